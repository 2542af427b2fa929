"""`baton doctor --model`: of a folder, without its weights."""

from __future__ import annotations

import json

import pytest
from test_doctor import doctor, plain
from tiny_families import BY_LAYER, DENSE, EXPERTS, IMAGES, LATENTS
from tiny_models import write_tiny_model
from tiny_wrapped import WRAPPED

from engine import memory


def text_of(*arguments: str) -> tuple[int, str]:
    result = doctor("--model", *arguments)
    return result.exit_code, " ".join(" ".join(plain(result.output)).split())


def test_it_says_what_runs_how_and_how_much_kv_is_left(tmp_path, monkeypatch):
    """Two layers of 2 KV heads of 16 numbers, float32: 512 bytes a token."""
    monkeypatch.setattr(memory, "available_bytes", lambda: memory.GIB)
    code, text = text_of(str(write_tiny_model(tmp_path, tokenizer=False)))
    assert code == 0, text
    assert "ok model LlamaForCausalLM: 2 layers of 64, contexts of up to 2,048 tokens" in text
    assert "runs on this CPU with PyTorch" in text
    weights = 4 * (2 * 384 * 64 + 64 + 2 * (2 * 64 + 64 * (64 + 32 + 32 + 64 + 3 * 128)))
    tokens = (memory.GIB - weights - memory.BESIDE_BYTES) // 512
    assert f"0.50 GiB are left for KV: {tokens:,} tokens of 0.5 KiB" in text


@pytest.mark.parametrize("name", ["demo", "org/name", "/nowhere"])
def test_what_is_not_here_is_not_called_a_wrong_model(name):
    code, text = text_of(name)
    assert (code, "is not on this machine -> fetch it" in text) == (1, True)


def test_a_config_alone_is_enough_and_windows_are_counted_by_sequence(tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **BY_LAYER["gemma4_shared"])
    (path / "model.safetensors").unlink()
    code, text = text_of(str(path))
    assert code == 0, text
    assert "Gemma4ForCausalLM: 6 layers" in text
    # One layer sees all tokens (2 heads of 32), two have a window of 12 tokens (2 heads of 16).
    assert "tokens of 0.5 KiB, beside 0.0 MiB a sequence in windows" in text
    assert (
        "full: 1 layers, 0.5 KiB a token; window-12: 2 layers, at most 0.0 MiB a sequence" in text
    )
    # 3 pages of windows, 16 tokens x 2 layers x 2 x 2 heads x 16 x 4 bytes each, and 1,024 tokens.
    assert f"a sequence holds {(3 * 8192 + 1024 * 512) / (1 << 20):.1f} MiB with 1,024" in text


def test_of_windows_in_all_layers_sequences_are_counted(tmp_path, monkeypatch):
    """Three pages of 16 tokens, 2 layers of 2 heads of 16 numbers: 24 KiB a sequence."""
    monkeypatch.setattr(memory, "available_bytes", lambda: memory.GIB)
    path = write_tiny_model(tmp_path, tokenizer=False, **DENSE["phi3"])
    code, text = text_of(str(path))
    assert code == 0, text
    assert "of the longest sequences, each with 0.0 MiB in windows" in text
    left, sequences = text.split(" are left for KV: ")
    count = int(sequences.split()[0].replace(",", ""))
    assert count * 4 * 16 * 512 == pytest.approx(float(left.split()[-2]) * memory.GIB, rel=0.02)
    assert "groups window-24: 2 layers, at most 0.0 MiB a sequence; a sequence holds" in text


def test_of_latents_a_token_has_one_for_all_heads(tmp_path):
    """Three layers of 32 + 8 numbers, float32: 480 bytes a token."""
    path = write_tiny_model(tmp_path, tokenizer=False, **LATENTS["deepseek_v3"])
    code, text = text_of(str(path))
    assert code == 0, text
    assert "tokens of 0.5 KiB" in text
    assert "experts 3 of 8 for each token; whole on 2, 4, 8 ranks (--expert-parallel" in text
    tokens, left = (float(text.split(before)[0].split()[-1].replace(",", "")) for before in (
        " tokens of 0.5 KiB", " GiB are left for KV"
    ))  # fmt: skip
    assert tokens * 480 == pytest.approx(left * (1 << 30), rel=0.02)


def test_the_text_part_of_an_image_checkpoint_is_said(tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **IMAGES["qwen3_vl"])
    code, text = text_of(str(path))
    assert (code, "a request with an image is refused" in text) == (0, True)


def test_what_does_not_run_is_an_error_with_its_reason(tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **EXPERTS["hy_v3"])
    config = json.loads((path / "config.json").read_text())
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    code, text = text_of(str(path))
    assert code == 1
    assert "ERROR model HYV3ForCausalLM: rope type dynamic is not supported" in text
    assert "HYV3ForCausalLM, through transformers' own code: its rope follows" in text
    code, text = text_of(str(tmp_path / "none"))
    assert (code, "ERROR model" in text) == (1, True)


def test_a_model_without_a_file_of_ours(tmp_path):
    code, text = text_of(str(write_tiny_model(tmp_path, tokenizer=False, **WRAPPED["vaultgemma"])))
    assert code == 0, text
    assert "VaultGemmaForCausalLM: 3 calls of attention of 64" in text
    assert "code transformers' own, over our pages" in text
    assert "window-12: 2 layers" in text


@pytest.mark.parametrize("free", [0, 100 << 20])
def test_what_does_not_fit_is_an_error(free, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    code, text = text_of(str(write_tiny_model(tmp_path, tokenizer=False)))
    assert code == 1
    assert "nothing is left for KV -> free memory, take more ranks (--tp, --pp, --nodes)" in text
