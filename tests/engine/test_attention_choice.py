"""Which kernels attend on a Hopper, and what the log says of the others. The GPU is a stand-in: the
choice looks at the pool, the layers and the libraries alone."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from engine.attention import choose_backend, select
from engine.cuda.attention_kernels import CudaKernels
from engine.step.attention import AttentionSpec

PLAIN = (AttentionSpec(0.1), AttentionSpec(0.1, 64))
CAPPED = (AttentionSpec(0.1), AttentionSpec(0.1, 64, soft_cap=50.0))
SINKS = (AttentionSpec(0.1, sinks=torch.zeros(4)),)


def library(*more: str) -> ModuleType:
    """FlashAttention-3, by the arguments of its function."""
    module = ModuleType("flash_attn_interface")
    names = ", ".join(f"{name}=None" for name in ("q", "k", "v", "softmax_scale", *more))
    exec(f"def flash_attn_varlen_func({names}): ...", module.__dict__)
    return module


@pytest.fixture
def choose(monkeypatch, caplog):
    """Chooses on a Hopper for heads of some width; gives the name, and what was logged."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(select, "_gpu_obstacle", lambda _pool: "")
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    builders = {name: lambda *_, name=name: name for name in select.BACKENDS[1:]}
    monkeypatch.setattr(select, "_BUILDERS", builders)

    def chosen(specs, dim=128, sinks="", *, gathers=False):
        module = library(*filter(None, [sinks]))
        monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
        pool = SimpleNamespace(
            head_dim=dim, page_size=16, gathers=gathers, precision="fp8", device="cuda:0"
        )
        caplog.clear()
        with caplog.at_level(logging.INFO, "baton.engine"):
            found = choose_backend("auto", pool, specs, CudaKernels())
        return found, caplog.messages[-1]

    return chosen


@pytest.mark.parametrize("gathers", [False, True])
def test_plain_layers_have_flash_attention_3(choose, gathers):
    assert choose(PLAIN, gathers=gathers)[0] == "fa3"


@pytest.mark.parametrize(
    ("specs", "dim", "why"),
    [
        (CAPPED, 256, "not fa3: its library is built without soft caps"),
        (PLAIN, 96, "not fa3: head dimension 96 is not one of"),
        (SINKS, 64, "not fa3: its library knows no sinks"),
    ],
)
def test_what_the_library_lacks_is_told(choose, specs, dim, why):
    name, logged = choose(specs, dim)
    assert name == "triton"
    assert why in logged


@pytest.mark.parametrize("sinks", ["s_aux", "learnable_sink"])
def test_a_library_that_knows_sinks_has_them(choose, sinks):
    assert choose(SINKS, 64, sinks)[0] == "fa3"


def test_fp8_kv_with_caps_is_left_to_torch(choose):
    name, logged = choose(CAPPED, 256, gathers=True)
    assert name == "sdpa"
    assert "not triton: it reads pages in place, and cannot read fp8 KV" in logged
