"""`python -m engine.ranks FOLDER PARENT` runs a rank. Rank 0 starts it (`engine.ranks.keeper`).
Without FOLDER it waits for an order (`engine.hosts.early`)."""

from __future__ import annotations

import sys

from engine.hosts.early import ordered
from engine.ranks.follower import main

if __name__ == "__main__":
    *given, parent = sys.argv[1:]
    main(given[0] if given else ordered(parent), parent)
