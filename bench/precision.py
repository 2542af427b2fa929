"""What a precision costs in quality: perplexity, and how far its answers are from float32's.

python -m bench.precision [--model FOLDER] [--options JSON]... [--checkpoint NAME=FOLDER]...

4,000 tokens of `bench/texts/docs.txt` (Baton's own pages, as they were in November 2026) run as
prompts of 500, each alone, through engines on the CPU, in chunks of 512. Each engine's logits are
compared with those of the float32 engine at the same positions:

    perplexity      exp of the mean of -log p(next token)
    KL              mean over the positions of sum p log(p / q); p float32's, q this engine's
    top token       share of the positions at which both have the same best token

`--options` are fields of `EngineConfig`, such as {"quantization": "fp8"}. A checkpoint is a folder
of the same model with quantised weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.eager.executor import TorchExecutor
from engine.engine import Engine
from engine.types import Event, Request, RequestFailed, SamplingParams, SequenceEnded, StopRules

TEXT = Path(__file__).with_name("texts") / "docs.txt"
TEXT_SHA256 = "dad35761defca7b3766456a683d4a7daaaece38f86894d439ee0d44277f4b26b"
TOKENS, WINDOW = 4000, 500
FLOAT = "float32"
BOUNDS = {"num_pages": 80, "max_sequences": 2, "max_step_tokens": 512, "prefix_cache": False}


class Figures(NamedTuple):
    """Of one engine."""

    name: str
    perplexity: float
    kl: float
    """Nats a token."""
    top: float
    """Share of positions with the same best token as float32."""

    def __str__(self) -> str:
        return f"| {self.name} | {self.perplexity:.3f} | {self.kl:.5f} | {100 * self.top:.1f} % |"


HEAD = "| weights and KV | perplexity | KL | top token |\n|---|---|---|---|"


def windows(model: Path) -> list[list[int]]:
    """The text in token ids, in parts of `WINDOW`.

    Raises:
        ValueError: the text is not the one whose figures are kept.
    """
    from transformers import AutoTokenizer

    content = TEXT.read_bytes()
    if hashlib.sha256(content).hexdigest() != TEXT_SHA256:
        raise ValueError(f"{TEXT} is another text than the one whose figures are kept")
    ids = AutoTokenizer.from_pretrained(model)(content.decode())["input_ids"][:TOKENS]
    if len(ids) < TOKENS:
        raise ValueError(f"{TEXT} has {len(ids)} tokens, {TOKENS} are measured")
    return [ids[first : first + WINDOW] for first in range(0, TOKENS, WINDOW)]


def measure(model: Path, precisions: Mapping[str, Mapping[str, Any]]) -> list[Figures]:
    """Figures of float32, and of each precision.

    Args:
        model: folder of the float checkpoint.
        precisions: by name, fields of `EngineConfig` that differ; `model` may be among them.
    """
    texts = windows(model)
    every = {FLOAT: {}, **precisions}
    sums: dict[str, list[Tensor]] = {name: [] for name in every}
    with ExitStack() as stack:
        score = {
            name: stack.enter_context(_scoring({"model": str(model), **options}))
            for name, options in every.items()
        }
        for ids in texts:
            exact = score[FLOAT](ids)
            for name in every:
                found = exact if name == FLOAT else score[name](ids)
                sums[name].append(_compared(exact, found, ids[1:]))
    return [_figures(name, torch.cat(parts)) for name, parts in sums.items()]


def _compared(exact: Tensor, found: Tensor, next_ids: Sequence[int]) -> Tensor:
    """[T, 3]: -log p of the next token, KL, and whether the best tokens are equal."""
    p, q = (logits.double().log_softmax(-1) for logits in (exact, found))
    lost = -q.gather(1, torch.tensor(next_ids)[:, None])[:, 0]
    kl = (p.exp() * (p - q)).sum(-1)
    return torch.stack((lost, kl, (p.argmax(-1) == q.argmax(-1)).double()), 1)


def _figures(name: str, each: Tensor) -> Figures:
    lost, kl, top = each.mean(0).tolist()
    return Figures(name, float(np.exp(lost)), kl, top)


@contextmanager
def _scoring(options: Mapping[str, Any]) -> Iterator[Callable[[Sequence[int]], Tensor]]:
    """A function that takes T tokens and gives the logits [T - 1, vocab] of an engine, with each of
    which it predicts the next token."""
    config = EngineConfig(**{"device": "cpu", "dtype": "float32", **BOUNDS, **options})
    engine = Engine.build(config)
    rows: list[Tensor] = []
    _keep_logits(engine, rows)
    engine.start()

    def score(ids: Sequence[int]) -> Tensor:
        rows.clear()
        _run(engine, ids)
        return torch.cat(rows)[: len(ids) - 1]

    try:
        yield score
    finally:
        engine.stop()


def _keep_logits(engine: Engine, rows: list[Tensor]) -> None:
    """From now on the logits of all positions go into `rows` too, those of a prompt first."""
    executor = engine._loop._executor
    assert isinstance(executor, TorchExecutor)
    model = executor.steps.model
    compute = model.logits

    def logits(hidden: Tensor) -> Tensor:
        found = compute(hidden)
        rows.append(found.clone())
        return found

    model.logits = logits  # type: ignore[method-assign]


def _run(engine: Engine, ids: Sequence[int]) -> None:
    done = threading.Event()
    failed: list[Event] = []

    def sink(events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, RequestFailed):
                failed.append(event)
            if isinstance(event, RequestFailed | SequenceEnded):
                done.set()

    request = Request(
        secrets.token_bytes(16),
        np.array(ids, np.int32),
        SamplingParams(temperature=0.0),
        StopRules(1),
        prompt_logprobs=True,
    )
    engine.submit(request, sink)
    done.wait()
    if failed:
        raise RuntimeError(f"a prompt of {len(ids)} tokens failed: {failed[0]}")


def main() -> None:
    """Prints the table."""
    from serving.models import demo_model

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of a float checkpoint; else SmolLM2")
    parser.add_argument("--options", action="append", default=[], metavar="JSON")
    parser.add_argument("--checkpoint", action="append", default=[], metavar="NAME=FOLDER")
    given = parser.parse_args()
    precisions: dict[str, Mapping[str, Any]] = {each: json.loads(each) for each in given.options}
    for each in given.checkpoint:
        name, _, folder = each.partition("=")
        precisions[name] = {"model": folder}
    precisions = precisions or {"FP8": {"quantization": "fp8"}}
    print(HEAD, *measure(given.model or demo_model.ensure(), precisions), sep="\n")


if __name__ == "__main__":
    main()
