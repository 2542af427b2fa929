"""The hook that `docs/hooks.md` shows measures what transformers computes."""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path

import pytest
import torch
from engine_kit import finish, running, submit
from hooks_kit import installed
from tiny_models import write_tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"
PROMPT = list(range(40, 90))


def entropies(path, tokens: list[int]) -> list[float]:
    """Bits of the last token's attention, by layer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.inference_mode():
        weights = model(torch.tensor([tokens]), output_attentions=True).attentions
    last = [layer[0, :, -1].double() for layer in weights]
    return [float(-(each * each.clamp_min(1e-30).log2()).sum(-1).mean()) for each in last]


def test_the_page_s_hook_logs_the_entropy_of_attention(tmp_path, caplog):
    page = PAGE.read_text(encoding="utf-8")
    code, program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (project,) = map(tomllib.loads, re.findall(r"```toml\n(.*?)```", page, re.DOTALL))
    ((group, points),) = project["project"]["entry-points"].items()
    (module,) = project["tool"]["setuptools"]["py-modules"]
    source = tmp_path / "source"
    source.mkdir()
    (source / f"{module}.py").write_text(code)
    text = "\n".join([f"[{group}]", *(f"{name} = {place}" for name, place in points.items())])
    model = write_tiny_model(tmp_path / "model", layers=3)
    with installed(tmp_path / "installed", text, source):
        with running(model, hooks=("entropy",)) as engine:
            with caplog.at_level(logging.INFO, "baton.entropy"):
                run = submit(engine, PROMPT, 3, extensions={"entropy": b""})
                finish(run, submit(engine, PROMPT, 3))
            assert not engine.load().hook_failures
        before = len(caplog.messages)
        with caplog.at_level(logging.INFO, "baton.entropy"):
            exec(program.replace('"demo"', f'"{model}"'), {})
        logged = [line for line in caplog.messages[before:] if "bits by layer" in line]
        assert len(logged) == 2
    found = [re.findall(r"\d+\.\d+", line) for line in caplog.messages if "bits by" in line]
    assert len(found) >= 2
    for count, bits in enumerate(found[:2], 1):
        want = entropies(model, [*PROMPT, *run.tokens[0][:count]])
        assert [float(each) for each in bits] == pytest.approx(want, abs=0.006)
