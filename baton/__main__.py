"""`python -m baton` is the `baton` command."""

from console.cli import main

main()
