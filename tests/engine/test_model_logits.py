"""Logits against transformers on the same random weights, for every family and option."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from halved_layers import halved
from tiny_families import EVERY, LONGROPE
from tiny_models import reference_model, write_tiny_model

from engine.attention import choose_backend
from engine.attention.grouped import GroupedAttention
from engine.cuda.attention_kernels import CudaKernels
from engine.model import LoadedModel, UnsupportedModelError, load_model
from engine.pool.kinds import maker
from engine.pool.pools import Place
from engine.step.attention import AttentionBatch

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
CASES = {
    "llama": {},
    "mha_tied": {"kv_heads": 4, "tie_word_embeddings": True},
    "gqa8_head_dim": {"heads": 8, "kv_heads": 1, "head_dim": 32},
    "biases_gelu": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "gelu_tanh_rope_linear": {
        "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "mistral_window": {"family": "mistral", "sliding_window": 24},
    "qwen2_window": {
        "family": "qwen2", "use_sliding_window": True, "sliding_window": 16,
        "max_window_layers": 1, "layers": 3,
    },
    "qwen3": {"family": "qwen3", "head_dim": 32},
    **EVERY,
}  # fmt: skip


class Runner:
    """Runs steps of a model over scattered pages."""

    def __init__(self, loaded: LoadedModel, page_size: int = 8, num_pages: int = 64, seed: int = 0):
        config = loaded.config
        self.model = loaded.model
        self.model.finish()  # as the engine does
        dtype = next(loaded.model.parameters()).dtype
        groups: dict[tuple[int, int, int | None], list[int]] = {}
        for layer, kept in config.keepers.items():
            shape = kept.kv_heads, kept.head_dim, kept.values
            groups.setdefault(shape, []).append(layer)
        places: dict[int, Place] = {}
        backends, specs = [], loaded.model.attention_specs
        for (heads, dim, values), layers in groups.items():
            make = maker("auto", page_size, heads=heads, dim=dim, values=values, dtype=dtype)
            self.pool = make(num_pages=num_pages, num_layers=len(layers), device=CPU)
            own = tuple(specs[layer] for layer in layers)
            places |= {layer: Place(len(backends), at) for at, layer in enumerate(layers)}
            backends.append(choose_backend("auto", self.pool, own, CudaKernels()))
        nowhere = Place(0, 0)  # Of a layer without attention, and of one that reads another's.
        self.attention = GroupedAttention(
            backends, [places.get(at, nowhere) for at in range(config.num_layers)]
        )
        self.free = np.random.default_rng(seed).permutation(np.arange(1, num_pages)).tolist()
        self.pages: dict[int, list[int]] = {}
        self.length: dict[int, int] = {}

    def begin(self, batch: AttentionBatch) -> None:
        """All groups have the same pages here."""
        for backend in self.attention.backends:
            backend.begin(batch)

    @torch.inference_mode()
    def step(self, rows: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
        """Rows are (sequence, new tokens), one-token rows first. Logits of each row's tokens."""
        size = self.pool.page_size
        starts = [self.length.get(sequence, 0) for sequence, _ in rows]
        lens = [len(tokens) for _, tokens in rows]
        for (sequence, tokens), start in zip(rows, starts, strict=True):
            pages = self.pages.setdefault(sequence, [])
            while len(pages) * size < start + len(tokens):
                pages.append(self.free.pop())
            self.length[sequence] = start + len(tokens)
        width = max(len(self.pages[sequence]) for sequence, _ in rows)
        table = torch.tensor([(self.pages[s] + [0] * width)[:width] for s, _ in rows])
        row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lens))
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lens, strict=True)])
        self.begin(
            AttentionBatch(
                query_lens=np.array(lens, np.int32),
                context_lens=np.array([s + n for s, n in zip(starts, lens, strict=True)], np.int32),
                num_decodes=sum(n == 1 for n in lens),
                page_table=table,
                token_pages=table[row_of, positions // size],
                token_offsets=positions % size,
            )
        )
        ids = torch.tensor([token for _, tokens in rows for token in tokens])
        logits = self.model.logits(self.model(ids, positions, self.attention))
        return list(logits.split(lens))


def reference(path, ids: list[int], dtype=torch.float32) -> torch.Tensor:
    model = reference_model(path, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def load(path, **options) -> LoadedModel:
    return load_model(str(path), dtype=torch.float32, device=CPU, **options)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **CASES[case])
    ids = np.random.default_rng(1).integers(1, 384, 60).tolist()
    want = reference(path, ids)
    loaded = load(path)
    whole = Runner(loaded).step([(0, ids)])[0]
    torch.testing.assert_close(whole, want, atol=1e-4, rtol=1e-4)
    chunked = Runner(loaded, seed=2)
    parts = [chunked.step([(0, ids[a:b])])[0] for a, b in ((0, 16), (16, 35), (35, 52))]
    parts += [chunked.step([(0, [token])])[0] for token in ids[52:]]
    torch.testing.assert_close(torch.cat(parts), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("most", "tokens"), [(64, 60), (0, 100)], ids=["short", "long"])
def test_longrope(most, tokens, tmp_path):
    """transformers chooses by the length of what it computes; a cache needs one choice."""
    path = write_tiny_model(tmp_path, tokenizer=False, family="phi3", rope_parameters=LONGROPE)
    ids = np.random.default_rng(1).integers(1, 384, tokens).tolist()
    runner = Runner(load(path, max_context_tokens=most))
    parts = [runner.step([(0, ids[a:b])])[0] for a, b in ((0, 40), (40, tokens))]
    torch.testing.assert_close(torch.cat(parts), reference(path, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["mistral_window", "gemma2"])
def test_mixed_batch_equals_solo_rows(case, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **CASES[case])
    rng = np.random.default_rng(3)
    sequences = [rng.integers(1, 384, n).tolist() for n in (40, 9, 33, 50)]
    want = [reference(path, ids) for ids in sequences]
    runner = Runner(load(path))
    runner.step([(0, sequences[0][:39]), (1, sequences[1][:8]), (2, sequences[2][:20])])
    got = runner.step(
        [
            (0, sequences[0][39:]),
            (1, sequences[1][8:]),
            (2, sequences[2][20:]),
            (3, sequences[3]),
        ]
    )
    for logits, expected in zip(got, want, strict=True):
        torch.testing.assert_close(logits, expected[-len(logits) :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_transformers(dtype, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False)
    ids = np.random.default_rng(4).integers(1, 384, 40).tolist()
    loaded = load_model(str(path), dtype=dtype, device=CPU)
    exact = reference(path, ids)
    ours = (Runner(loaded).step([(0, ids)])[0] - exact).abs().mean()
    theirs = (reference(path, ids, dtype) - exact).abs().mean()
    assert ours <= 1.5 * theirs


def test_stale_bytes_in_page_tails_do_not_leak(tmp_path):
    loaded = load(write_tiny_model(tmp_path, tokenizer=False))
    ids = np.random.default_rng(5).integers(1, 384, 21).tolist()
    clean, dirty = Runner(loaded), Runner(loaded)
    dirty.pool.elements.fill_(3e4)
    for runner in (clean, dirty):
        runner.step([(0, ids[:13])])
    for token in ids[13:]:
        a, b = (runner.step([(0, [token])])[0] for runner in (clean, dirty))
        assert torch.equal(a, b)


def test_dummy_weights_depend_on_the_seed_alone(tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False)
    one, two, other = (load(path, load_format="dummy", seed=s) for s in (1, 1, 2))
    assert one.revision == two.revision != other.revision
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"family": "gpt_neox"}, "GPTNeoXForCausalLM"),
        ({"hidden_act": "relu"}, "relu"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options, words, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **options)
    with pytest.raises(UnsupportedModelError, match=words):
        load(path, model_impl="native")


@torch.inference_mode()
def test_a_layer_may_have_one_part(tmp_path):
    loaded = load(write_tiny_model(tmp_path, tokenizer=False, **EVERY["gemma2"]))
    ids = np.random.default_rng(1).integers(1, 384, 60).tolist()
    halves = Runner(halved(loaded))
    got = torch.cat([halves.step([(0, part)])[0] for part in (ids[:21], ids[21:])])
    assert torch.equal(got, Runner(loaded).step([(0, ids)])[0])
