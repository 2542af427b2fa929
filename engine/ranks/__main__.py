"""`python -m engine.ranks FOLDER PARENT` runs a rank. Rank 0 starts it (`engine.ranks.keeper`).
Without FOLDER it waits for an order (`engine.hosts.early`)."""

from __future__ import annotations

import sys

from engine.hosts.early import ordered
from engine.parent import end_with_parent

if __name__ == "__main__":
    *given, parent = sys.argv[1:]
    end_with_parent(int(parent))  # First: what follows imports for seconds.
    from engine.ranks.follower import main

    main(given[0] if given else ordered())
