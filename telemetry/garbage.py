"""Python's garbage collector in a process that must not stand still.

A full collection looks at every object there is, and nothing else in the process runs meanwhile: a
tenth of a second in a router or a worker, most of it for modules and classes that live as long as
the process. Once a process is ready these are set apart, and a full collection looks only at what
came since.
"""

from __future__ import annotations

import gc


def set_apart() -> None:
    """No later collection looks at what is there now. Called when a process is ready."""
    gc.collect()
    gc.freeze()
