"""`python -m engine.ranks FOLDER PARENT` runs a rank. Rank 0 starts it (`engine.ranks.keeper`)."""

from __future__ import annotations

import sys

from engine.ranks.follower import main

if __name__ == "__main__":
    main(*sys.argv[1:])
