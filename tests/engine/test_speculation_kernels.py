"""The kernels of verify steps, against `engine.speculation`, noise on the host and a rule written
out: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for GPUs")

if torch.cuda.is_available():
    import speculation_checks as checks

    CHECKS = checks.CHECKS
else:
    CHECKS = []


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_kernels(check):
    check()
