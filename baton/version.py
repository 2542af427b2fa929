"""The release of Baton. Both distributions have it."""

from typing import Final

__version__: Final = "0.2.0"
