"""Tables of rotations: as each step computes them, in little more memory than they take."""

from __future__ import annotations

import pytest
import torch
from test_model_logits import load
from tiny_families import DENSE
from tiny_models import write_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.mixers.rope import BLOCK

LENGTH = 2 * BLOCK + 7
CASES = {"llama": {}, **{name: DENSE[name] for name in ("gemma3", "phi4_mini", "smollm3", "olmo3")}}


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        if isinstance(found, torch.Tensor) and not function.is_view:
            self.elements = max(self.elements, found.numel())
        return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_has_what_a_step_computes(case, dtype, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **CASES[case])
    ropes = load(path).model.ropes
    assert ropes.frequencies
    for rope in ropes.frequencies:
        pairs = len(rope.frequencies)
        table = torch.full((LENGTH, 2, pairs + 1), 9.0, dtype=dtype)
        with Largest() as largest:
            ropes.fill(rope, table[:, :, :pairs])
        wanted = ropes.rotation(rope, torch.arange(LENGTH), dtype)
        for row, want in enumerate(wanted):
            assert torch.equal(table[:, row, :pairs], want[:, 0, :pairs])
        assert (table[:, :, pairs] == 9.0).all()
        assert largest.elements <= 2 * BLOCK * pairs
