"""What lives as long as the process costs later collections nothing, and these are rare."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from serving import garbage

garbage.set_apart()
pauses = []
gc.callbacks.append(lambda phase, info: pauses.append(info["generation"]))
before = gc.get_freeze_count()
requests = [[{}] for _ in range(garbage.YOUNG // 4)]
print(before > 1000, pauses)
"""


def test_the_objects_of_requests_under_way_bring_no_pause() -> None:
    """By Python's own threshold these bring a dozen."""
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "[]"]
