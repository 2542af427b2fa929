"""`python -m baton` is the `baton` command."""

from baton.console.cli import main

main()
