"""KV in FP8: SmolLM2, greedy, float32, equals transformers over the same rounded KV, on every path.

Noise of float32 sums moves a number across the border between two of e4m3 about once in 10^5. Such
a step is large, and thirty layers multiply it: two implementations that both round rightly are soon
a tenth of a logit apart. So the reference takes the engine's side at a border. What the last step
of a sequence read from the pool is written down. Every number of it must be a right rounding of
what transformers has, layer by layer, and attention goes on with it. Then nothing is left but the
usual noise, and tokens must be equal wherever the two best logits are further apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import demo_prompts as demo
import pytest
import torch
from engine_kit import Run, build, finish, hand_off, held, running, stop, submit
from references import NOISE
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from engine.attention import AttentionError, choose_backend
from engine.attention.sdpa import SdpaBackend
from engine.cuda.attention_kernels import CudaKernels
from engine.engine import Engine, EngineError
from engine.model.decoder import Model
from engine.pages.watch import CacheEvent, CacheEventKind
from engine.pool.fp8_rounding import Rounded, round_rows, widen
from engine.step.attention import AttentionSpec

pytestmark = pytest.mark.timeout(300)

AT_A_BORDER = 2.0**-14
"""Of a row's largest number: noise in what is rounded."""
MOST_FLIPS = 1e-4
"""Share of numbers that may be rounded to the other side."""
MAX_TOKENS = 8
FP8 = {"kv_cache_dtype": "fp8"}
SOME = (3, 9)
"""Prompts of the demo model's tests that `make test` takes: both of several chunks."""

prompts = demo.prompts
Context = list[Tensor]
"""What a row read of each layer: [2, Hkv, n, D], K and V."""


class OtherContextError(Exception):
    """A context is not a rounding of what transformers has."""


class Contexts:
    """What rows of an engine read from its pool when their contexts had a certain length."""

    def __init__(self) -> None:
        self._found: dict[int, list[Context]] = {}
        self.numbers = self.flips = 0

    def want(self, length: int) -> None:
        self._found.setdefault(length, [])

    def of(self, length: int) -> list[Context]:
        return self._found[length]

    def look(self, attention: SdpaBackend, layers: int) -> None:
        """After a step, whose new KV is stored."""
        pool, batch = attention._pool, attention._batch
        for row in range(batch.num_decodes):
            length = int(batch.context_lens[row])
            if (found := self._found.get(length)) is not None:
                places = pool.places(batch.page_table[row, : -(-length // pool.page_size)])
                both = [torch.stack(pool.gather(layer, places)) for layer in range(layers)]
                found.append([one[:, :, :length] for one in both])


class ContextCache(DynamicCache):
    """A cache of transformers that keeps what an engine read, if it is rounded rightly."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self.numbers = self.flips = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer: int, *args, **options):
        x, read = torch.cat((key_states, value_states)), self._context[layer]
        own = widen(round_rows(x), x.dtype)
        noise = AT_A_BORDER * x.abs().amax(-1, keepdim=True)
        if not ((read - x).abs() <= (own - x).abs() + noise).all():
            raise OtherContextError(layer)
        self.numbers += x.numel()
        self.flips += int((read != own).sum())
        return super().update(read[:1], read[1:], layer, *args, **options)


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> Contexts:
    kept, forward = Contexts(), Model.forward

    def watched(self: Model, token_ids, positions, attention: SdpaBackend) -> Tensor:
        hidden = forward(self, token_ids, positions, attention)
        kept.look(attention, self.config.num_layers)
        return hidden

    monkeypatch.setattr(Model, "forward", watched)
    return kept


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)


def ask(contexts: Contexts, engine: Engine, prompt: list[int], tokens: int = MAX_TOKENS, **more):
    """Submits a request, which generates so many tokens."""
    contexts.want(len(prompt) + tokens - 1)
    return submit(engine, prompt, tokens, ignore_eos=True, **more)


def ask_all(contexts: Contexts, engine: Engine, prompts: list[list[int]], at_once: int):
    runs: list[Run] = []
    for start in range(0, len(prompts), at_once):
        group = [ask(contexts, engine, prompt) for prompt in prompts[start : start + at_once]]
        finish(*group, timeout_s=120)
        runs += group
    return runs


def hand_over(contexts: Contexts, one: Engine, other: Engine, prompt: list[int]) -> Run:
    contexts.want(len(prompt) + MAX_TOKENS - 1)
    return hand_off(one, other, prompt, MAX_TOKENS, ignore_eos=True)


@torch.inference_mode()
def check(runs: Sequence[Run], reference: torch.nn.Module, contexts: Contexts) -> None:
    for run in runs:
        prompt, given = run.request.prompt_ids.tolist(), run.request.generated
        for choice, tokens in enumerate(run.tokens):
            before = prompt + (given[choice].tolist() if given else [])
            logits = replay(reference, before + tokens[:-1], contexts)[len(before) - 1 :]
            behind = logits.amax(-1) - logits[torch.arange(len(tokens)), tokens]
            assert (behind < NOISE).all(), behind
    assert contexts.flips <= MOST_FLIPS * contexts.numbers


def replay(reference: torch.nn.Module, ids: list[int], contexts: Contexts) -> Tensor:
    """[n, vocab], by one of the contexts that engines had for these tokens."""
    reached = [-1]
    for context in contexts.of(len(ids)):
        cache = ContextCache(context)
        try:
            logits: Tensor = reference(torch.tensor([ids]), past_key_values=cache).logits[0]
        except OtherContextError as error:
            reached.append(error.args[0])
            continue
        contexts.numbers += cache.numbers
        contexts.flips += cache.flips
        return logits
    raise AssertionError(f"no engine read a right context; the best is wrong in {max(reached)}")


@pytest.mark.model
def test_whole_cached_in_chunks_and_handed_off(demo_model, prompts, reference, contexts):
    """What `make test` takes of the matrix below."""
    some = [prompts[i] for i in SOME]
    options = {"num_pages": 100, "max_sequences": 8, **FP8}
    with (
        running(demo_model, max_step_tokens=512, **options) as engine,
        running(demo_model, max_step_tokens=32, **options) as chunked,
    ):
        runs = ask_all(contexts, engine, some[:1], at_once=1)
        cached = engine.load().prompt_tokens_cached
        runs += ask_all(contexts, engine, some[:1], at_once=1)
        assert engine.load().prompt_tokens_cached > cached
        runs += ask_all(contexts, chunked, some[:1], at_once=1)
        runs.append(hand_over(contexts, chunked, engine, some[1]))
    check(runs, reference, contexts)


@pytest.mark.matrix
@pytest.mark.model
@pytest.mark.timeout(900)
class TestEveryPath:
    """Of the 24 prompts all, or as many as can be looked at in a minute or two."""

    def test_whole_then_from_the_prefix_cache(self, demo_model, prompts, reference, contexts):
        options = {"num_pages": 500, "max_sequences": 24, "max_step_tokens": 512, **FP8}
        with running(demo_model, **options) as engine:
            for at_once in (1, 24):
                check(ask_all(contexts, engine, prompts, at_once), reference, contexts)
            assert engine.load().prompt_tokens_cached > 0

    def test_in_small_chunks_then_handed_off(self, demo_model, prompts, reference, contexts):
        options = {"num_pages": 500, "max_sequences": 16, **FP8}
        with (
            running(demo_model, max_step_tokens=32, **options) as chunked,
            running(demo_model, max_step_tokens=512, **options) as engine,
        ):
            runs = ask_all(contexts, chunked, prompts[::2], at_once=16)
            runs += [hand_over(contexts, chunked, engine, prompt) for prompt in prompts[1::3]]
        check(runs, reference, contexts)

    def test_preempted(self, demo_model, prompts, reference, contexts):
        """A pool of a third of the need, and outputs that outgrow what admission keeps back."""
        some = [prompt for prompt in prompts if len(prompt) < 100][:8]
        need = sum(-(-(len(prompt) + 60) // 16) for prompt in some)
        options = {"num_pages": need // 3 + 1, "max_sequences": 24, "prefix_cache": False}
        with running(demo_model, max_step_tokens=64, **options, **FP8) as engine:
            with held(engine):
                runs = [ask(contexts, engine, prompt, 60) for prompt in some]
            finish(*runs, timeout_s=240)
            assert engine.load().preemptions > 0
        check(runs, reference, contexts)

    def test_resumed_and_of_several_choices(self, demo_model, prompts, reference, contexts):
        options = {"num_pages": 500, "max_sequences": 16, "max_step_tokens": 128, **FP8}
        with running(demo_model, **options) as engine:
            runs = [ask(contexts, engine, prompt, choices=3) for prompt in prompts[:8]]
            finish(*runs, timeout_s=240)
            for first in runs[:4]:
                prompt, given = first.request.prompt_ids.tolist(), first.tokens[0][:5]
                runs.append(ask(contexts, engine, prompt, generated=(given,)))
            finish(*runs[8:])
        check(runs, reference, contexts)


# -- what needs no trained model ------------------------------------------------------------------


def biased_model(path: Path, attention: float) -> Path:
    """Two channels of K, which turn with the position, have a bias of 900; q is small there."""
    write_tiny_model(path, tokenizer=False, family="qwen2", hidden=128, heads=2)
    file = path / "model.safetensors"
    weights = load_file(file)
    for name, tensor in weights.items():
        if name.endswith("k_proj.bias"):
            tensor.view(2, 64)[:, [4, 5]] = 900.0
        if "q_proj" in name:
            tensor.view(2, 64, -1)[:, [4, 5, 36, 37]] *= 0.01
        if name.endswith("o_proj.weight"):
            tensor *= attention
    save_file(weights, file, metadata={"format": "pt"})
    return path


def outputs_of(path: Path, **options: str) -> list[list[int]]:
    with running(path, **options) as engine:
        prompts = [list(range(5 * i, 60 + 9 * i)) for i in range(1, 6)]
        runs = [submit(engine, prompt, 8, ignore_eos=True) for prompt in prompts]
        finish(*runs)
    return [run.tokens[0] for run in runs]


def test_a_key_bias_of_900_gives_the_same_tokens_as_without_fp8(tmp_path, monkeypatch):
    """As in models with biases in their projections. A scale of 1, as is usual where nothing was
    calibrated, clips such keys to 448."""
    path = biased_model(tmp_path / "biased", attention=0.02)
    want = outputs_of(path)
    assert outputs_of(path, **FP8) == want
    without = outputs_of(biased_model(tmp_path / "without", attention=0.0))
    assert all(one != other for one, other in zip(without, want, strict=True)), "it attends"

    def clipped(x: Tensor) -> Rounded:
        values = x.clamp(-448, 448).to(torch.float8_e4m3fn)
        return Rounded(values, torch.zeros(x.shape[:-1], dtype=torch.int8))

    monkeypatch.setattr("engine.pool.fp8_pool.round_rows", clipped)
    clipping = outputs_of(path, **FP8)
    assert all(one != other for one, other in zip(clipping, want, strict=True)), "and would be off"


def engines_of(tiny_path: Path, *options: dict) -> list[Engine]:
    found = []
    for one in options:
        engine = build(tiny_path, num_pages=8, **one)
        engine.stop()
        found.append(engine)
    return found


def test_the_fingerprint_and_the_pages_tell_the_precision(tiny_path):
    plain, fp8, half = engines_of(tiny_path, {}, FP8, {"dtype": "bfloat16"})
    fingerprints = {engine.model.fingerprint for engine in (plain, fp8, half)}
    assert len(fingerprints) == 3
    assert [engine.pool.precision for engine in (plain, fp8, half)] == [
        "float32",
        "fp8",
        "bfloat16",
    ]
    values = 2 * 2 * 2 * 16 * 16
    assert [engine.pool.page_bytes for engine in (plain, fp8, half)] == [
        4 * values, values + 2 * 2 * 2 * 16, 2 * values
    ]  # fmt: skip


def test_keys_of_pages_tell_the_precision(tiny_path):
    """So that no store of pages, whoever keeps it, gives one for the other."""
    keys: list[set[bytes]] = []
    for options in ({}, FP8, {"dtype": "bfloat16"}):
        engine, heard = build(tiny_path, **options), []
        engine.subscribe(heard.append)
        finish(submit(engine, list(range(1, 60)), 4))
        stop(engine)
        events: list[CacheEvent] = heard
        keys.append({e.key for e in events if e.kind is CacheEventKind.STORED})
    assert [len(one) for one in keys] == [3, 3, 3]
    assert not keys[0] & keys[1] | keys[0] & keys[2] | keys[1] & keys[2]


def test_what_does_not_go_together_is_refused_before_weights_are_read(tiny_path):
    with pytest.raises(EngineError, match="multiple of 16 tokens, and page_size_tokens is 8"):
        build(tiny_path / "nowhere", page_size=8, **FP8)
    with pytest.raises(EngineError, match="'e5m2' is not one of auto, fp8"):
        build(tiny_path / "nowhere", kv_cache_dtype="e5m2")
    with pytest.raises(EngineError, match="fa2 cannot run here: it reads pages in place"):
        build(tiny_path, page_size=256, max_step_tokens=512, attention="fa2", **FP8)
    pool = engines_of(tiny_path, FP8)[0].pool
    with pytest.raises(AttentionError, match="cannot read fp8 KV: fa3 and sdpa can"):
        choose_backend("fa2", pool, (AttentionSpec(1.0),) * 2, CudaKernels())
