"""What transformers answers, token for token: computed once, then read from `references.json`.

An answer is stored under a digest of the model's weights and config, the prompt and the options. So
a model that was written anew gets new answers. What is not stored is computed. The variable
`BATON_REFERENCES` changes that:

- `write` stores what is computed;
- `compute` computes everything, and fails where a stored answer differs (`make test-slow`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STORE = Path(__file__).with_name("references.json")
MODE = os.environ.get("BATON_REFERENCES", "")
NOISE = 1e-3
"""Sums of float32 differ by less from machine to machine."""


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Where two outputs part; the length of the shorter one if they do not before its end."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Reference(NamedTuple):
    """A greedy answer."""

    tokens: list[int]
    margins: list[float]
    """Best minus second best logit, per token."""


class References:
    """Greedy answers of the model in a folder, in float32; with `fp8_kv` over a cache that rounds
    as an FP8 pool does."""

    def __init__(
        self,
        path: Path,
        precision: str = "",
        load: Callable[[], Any] | None = None,
        noise: float = NOISE,
        fp8_kv: bool = False,
        whole: bool = False,
    ) -> None:
        """Answers of the model in a folder.

        Args:
            path: the folder.
            precision: name of what `load` does to the model, if anything.
            load: gives the model; None: as transformers loads the folder.
            noise: what two computations of a logit differ by at most.
            fp8_kv: whether the cache rounds.
            whole: whether each token is that of a pass over all before it, without a cache.
        """
        self._load = load or (lambda: _load_float32(path))
        self._fp8_kv, self._whole = fp8_kv, whole
        self._model: Any = None
        self._marks = [_digest_of(path), *filter(None, [precision])]
        self.noise = noise

    def __call__(
        self, prompt: Sequence[int], max_tokens: int, *, past_end: bool = False
    ) -> Reference:
        """The answer up to and with end of sequence, or `past_end` to its full length."""
        options = [*self._marks, list(prompt), max_tokens, past_end]
        options += ["fp8"] * self._fp8_kv + ["whole"] * self._whole
        key = hashlib.sha256(json.dumps(options).encode()).hexdigest()[:24]
        stored = _stored().get(key)
        if stored is not None and MODE != "compute":
            return Reference(*stored)
        found = self._compute(prompt, max_tokens, past_end)
        if stored is not None:
            _compare(Reference(*stored), found, self.noise)
        elif MODE == "write":
            store(key, [found.tokens, [round(margin, 5) for margin in found.margins]])
        return found

    def check(self, run: Any, max_tokens: int, given: int = 0) -> None:
        """A run, which went on after `given` tokens of the answer, has in every choice the tokens
        of the answer up to the first that noise may decide."""
        want = self(run.request.prompt_ids.tolist(), max_tokens, past_end=True)
        assert run.failed is None
        for tokens in run.tokens:
            found = want.tokens[:given] + tokens
            if found != want.tokens:
                assert want.margins[first_difference(found, want.tokens)] < self.noise

    def check_client(self, client: Any, lengths: Sequence[int] = (5, 40, 200)) -> None:
        """A client of a cluster is answered with these tokens, behind prompts of these lengths."""
        for length in lengths:
            prompt = np.random.default_rng(length).integers(1, 384, length).tolist()
            answer = client.generate(
                token_ids=prompt, max_tokens=12, temperature=0.0, ignore_eos=True
            )
            assert list(answer.token_ids) == self(prompt, 12, past_end=True).tokens

    def _compute(self, prompt: Sequence[int], max_tokens: int, past_end: bool) -> Reference:
        import torch

        if self._model is None:
            self._model = self._load()
        ids = torch.tensor([list(prompt)])
        cache = {"past_key_values": rounding_cache()} if self._fp8_kv else {}
        cache |= {"use_cache": False} if self._whole else {}
        least = {"min_new_tokens": max_tokens, "eos_token_id": None} if past_end else {}
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            **least,
            **cache,
        )
        best = torch.cat(out.logits).topk(2).values
        margins = (best[:, 0] - best[:, 1]).tolist()
        return Reference(out.sequences[0, len(prompt) :].tolist(), margins)


def _load_float32(path: Path) -> Any:
    import torch
    from tiny_models import reference_model

    return reference_model(path, dtype=torch.float32)


def rounding_cache() -> Any:
    """A cache of transformers that keeps, and gives to attention, K after rope and V as an FP8 pool
    stores them."""
    from transformers import DynamicCache

    from engine.pool.fp8_rounding import round_rows, widen

    class RoundingCache(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *args: Any, **options: Any) -> Any:
            k, v = (widen(round_rows(x), x.dtype) for x in (key_states, value_states))
            return super().update(k, v, *args, **options)

    return RoundingCache()


@cache
def references(path: Path, fp8_kv: bool = False, whole: bool = False) -> References:
    """Those of the model in a folder."""
    return References(path, fp8_kv=fp8_kv, whole=whole)


def generate_reference(
    path: Path, fp8_kv: bool = False
) -> Callable[[tuple[int, ...], int], list[int]]:
    """Greedy output by transformers up to and with end of sequence."""
    return lambda prompt, max_tokens: references(path, fp8_kv)(prompt, max_tokens).tokens


def store(key: str, answer: Any) -> None:
    """Adds an answer to those that the file has by now: other processes may write, too."""
    with STORE.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = json.loads(file.read() or "{}") | {key: answer}
        lines = [f'"{name}": {json.dumps(one)}' for name, one in sorted(known.items())]
        file.truncate(0)
        file.write("{\n" + ",\n".join(lines) + "\n}\n")
        file.flush()
    _stored.cache_clear()


@cache
def _stored() -> dict[str, Any]:
    if not STORE.exists():
        return {}
    with STORE.open(encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return json.load(file)


@cache
def _digest_of(path: Path) -> str:
    config = json.loads((path / "config.json").read_text())
    config.pop("transformers_version", None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for weights in sorted(path.glob("*.safetensors")):
        digest.update(weights.read_bytes())
    return digest.hexdigest()


def _compare(stored: Reference, found: Reference, noise: float) -> None:
    pairs = zip(stored.tokens, found.tokens, found.margins, strict=False)
    at_fault = next((margin for one, other, margin in pairs if one != other), 0.0)
    assert at_fault < noise, "a stored answer is not what transformers says: see references.py"
