"""What sparse attention costs in quality: the perplexity of a text, dense and by budget.

python -m bench.sparse_attention [--budgets N ...] [--segment N] [--stride N] [--tokens N]
                                 [--model FOLDER]

The steps are a worker's own (`TorchSteps` with the hook `quest` of `examples/hook-quest`), driven
one by one. All budgets are rows of the same steps. The text is `bench/texts/long.txt`: Baton's own
pages, as they were in November 2026.

Segments lie in the text, one every `--stride` tokens. What lies before a segment is a prompt. Each
of its tokens is a decode row whose token is forced to be the text's. All segments run in the same
steps; with `--segment 8000 --stride 8000` there is one, of the whole text. Dense figures are of
the same tokens, in a prompt.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import EngineConfig
from engine.parts.building import load, torch_steps
from engine.parts.paging import make_pages
from engine.step.collective import Alone
from engine.step.plan import StepPlan
from engine.step.sampling import SamplePlan

TEXT = Path(__file__).with_name("texts") / "long.txt"
TEXT_SHA256 = "04f8e76d0fa62c91b86e912ba2229ac41c59d93a9c37cd00ac1f7fe5f8a11b36"
TOKENS, PROMPT, CHUNK, PAGE = 8000, 1024, 512, 16
SEGMENT, STRIDE = 256, 2048
BUDGETS = (512, 1024)
QUEST = Path(__file__).parents[1] / "examples" / "hook-quest"
Ints = NDArray[np.int32]


def quest() -> Any:
    """The hook of `examples/hook-quest`."""
    if str(QUEST) not in sys.path:
        sys.path.insert(0, str(QUEST))
    return importlib.import_module("baton_quest").make({})


class Rig:
    """A model with a pool, and steps that are planned here: R sequences, each with its pages."""

    def __init__(self, model: Path, sequences: int, most_tokens: int) -> None:
        pages = (sequences + 1) * (-(-most_tokens // PAGE)) + 1
        config = EngineConfig(
            model=str(model),
            device="cpu",
            dtype="float32",
            num_pages=pages,
            max_sequences=64,
            hook_limit_s=math.inf,
        )
        device = torch.device("cpu")
        loaded = load(config, device, collective=Alone())
        pools = make_pages(pages, config, loaded, device)
        self._steps = torch_steps(config, loaded, pools, [quest()])
        self._model = loaded.model
        self._number = 0

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], table: Ints, *, scored: bool = False) -> Tensor:
        """Computes a prompt into the pages of `table`, [P].

        Returns:
            -log p of each token from the second on, if `scored`; else nothing.
        """
        lost = []
        for start in range(0, len(ids), CHUNK):
            end = min(start + CHUNK, len(ids))
            tokens = np.array(ids[start:end], np.int32)
            hidden = self._run(tokens, np.array([start]), table[None], np.zeros(1), 0)
            if scored:
                following = torch.tensor(ids[start + 1 : end + 1])
                lost.append(self._lost(hidden[: len(following)], following))
        return torch.cat(lost) if scored else torch.zeros(0)

    @torch.inference_mode()
    def decode(
        self, tokens: Ints, at: NDArray[Any], tables: Ints, budgets: Sequence[int]
    ) -> Tensor:
        """One decode row for each of `tables` [R, P], with a token at a place each.

        Returns:
            Logits, [R, vocab].
        """
        hidden = self._run(tokens, at, tables, np.array(budgets) // PAGE, len(tables))
        return self._model.logits(hidden)

    def _run(
        self, tokens: Ints, starts: NDArray[Any], tables: Ints, terms: NDArray[Any], decodes: int
    ) -> Tensor:
        rows, queries = len(tables), np.full(len(tables), len(tokens) // len(tables), np.int32)
        ends = (starts + queries).astype(np.int32)
        inside = np.arange(tables.shape[1]) < -(-ends // PAGE)[:, None]
        nothing = np.zeros(0, np.int32)
        plan = StepPlan(
            number=self._number,
            token_ids=tokens,
            positions=np.concatenate(
                [np.arange(a, b) for a, b in zip(starts, ends, strict=True)]
            ).astype(np.int32),
            row_slots=np.arange(rows, dtype=np.int32),
            query_lens=queries,
            context_lens=ends,
            num_decodes=decodes,
            page_table=np.where(inside, tables, 0)[:, : -(-int(ends.max()) // PAGE)],
            sample_tokens=nothing,
            sample_slots=nothing,
            sample_generations=nothing,
            sample_indices=nothing,
            sample=SamplePlan(0),
            copy_source=nothing,
            copy_target=nothing,
            write_slots=np.arange(decodes, dtype=np.int32),
            write_tokens=tokens[:decodes],
            hook_tags=terms.astype(np.int32)[None],
        )
        self._number += 1
        self._steps.prepare(plan)
        hidden = self._steps.forward(plan)
        self._steps.end()
        assert self._steps.hooks is not None
        if self._steps.hooks.failures:
            raise RuntimeError(f"the hook failed: {self._steps.hooks.failures}")
        return hidden

    def _lost(self, hidden: Tensor, following: Tensor) -> Tensor:
        parts = [
            torch.nn.functional.cross_entropy(
                self._model.logits(hidden[at : at + 256]),
                following[at : at + 256],
                reduction="none",
            )
            for at in range(0, len(hidden), 256)
        ]
        return torch.cat(parts) if parts else torch.zeros(0)


def _pages(first: int, count: int) -> Ints:
    return np.arange(first, first + count, dtype=np.int32)


def text(tokenizer: Any) -> list[int]:
    """The text in token ids.

    Raises:
        ValueError: it is not the one whose figures are kept.
    """
    content = TEXT.read_bytes()
    if hashlib.sha256(content).hexdigest() != TEXT_SHA256:
        raise ValueError(f"{TEXT} is another text than the one whose figures are kept")
    ids: list[int] = tokenizer(content.decode())["input_ids"]
    return ids


class Segment(NamedTuple):
    """A part of the text that decode rows go through, behind a prompt."""

    start: int
    end: int


def perplexity(
    model: Path, ids: Sequence[int], budgets: Sequence[int], most: int, stride: int
) -> None:
    """Prints the perplexity of segments of at most `most` tokens, one every `stride` tokens of the
    text, dense and with each budget."""
    count = -(-len(ids) // PAGE)
    last = len(ids) - 1
    segments = [Segment(at, min(at + most, last)) for at in range(PROMPT, last, stride)]
    rig = Rig(model, 1 + len(budgets), len(ids) + PAGE * len(segments))
    began_s = time.monotonic()
    dense = rig.prefill(ids, _pages(1, count), scored=True)
    print(f"# dense: {time.monotonic() - began_s:.0f} s", flush=True)
    tables, terms = _segment_tables(segments, len(budgets), count), list(budgets) * len(segments)
    lost = torch.full((len(budgets), len(ids) - 1), torch.nan)
    for step in range(most):
        live = [index for index, one in enumerate(segments) if one.start + step < one.end]
        if not live:
            break
        rows = [index * len(budgets) + column for index in live for column in range(len(budgets))]
        at = np.repeat([segments[index].start + step for index in live], len(budgets))
        tokens = np.array([ids[place] for place in at], np.int32)
        logits = rig.decode(tokens, at, tables[rows], [terms[row] for row in rows])
        following = torch.tensor([ids[place + 1] for place in at])
        each = torch.nn.functional.cross_entropy(logits, following, reduction="none")
        columns = torch.arange(len(budgets)).repeat(len(live))
        lost[columns, torch.from_numpy(at)] = each
        if step % 50 == 0:
            print(f"# step {step}: {time.monotonic() - began_s:.0f} s", flush=True)
    _print_perplexities(dense, lost, budgets)


def _segment_tables(segments: Sequence[Segment], budgets: int, count: int) -> Ints:
    """[segments * budgets, count]: the dense pages before a segment, then pages of the row."""
    tables, free = [], 1 + count
    for start, end in segments:
        for _ in range(budgets):
            shared, own = start // PAGE, -(-end // PAGE) - start // PAGE
            table = np.zeros(count, np.int32)
            table[:shared], table[shared : shared + own] = _pages(1, shared), _pages(free, own)
            tables.append(table)
            free += own
    return np.stack(tables)


def _print_perplexities(dense: Tensor, lost: Tensor, budgets: Sequence[int]) -> None:
    measured = ~lost[0].isnan()
    late = measured & (torch.arange(len(dense)) >= len(dense) // 2)
    counts = f"{int(measured.sum())} tokens", f"{int(late.sum())} in the second half"
    print(f"| a row reads | perplexity, {counts[0]} | more | {counts[1]} | more |")
    print("|---|---|---|---|---|")
    whole, last = (dense[where].mean().exp().item() for where in (measured, late))
    print(f"| all | {whole:.3f} | | {last:.3f} | |")
    for budget, each in zip(budgets, lost, strict=True):
        a, b = (each[where].mean().exp().item() for where in (measured, late))
        print(
            f"| {budget} tokens | {a:.3f} | {100 * (a / whole - 1):+.2f} % |"
            f" {b:.3f} | {100 * (b / last - 1):+.2f} % |"
        )


def main() -> None:
    """Prints the tables."""
    from transformers import AutoTokenizer

    from serving.models import demo_model

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; else SmolLM2")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--segment", type=int, default=SEGMENT)
    parser.add_argument("--stride", type=int, default=STRIDE)
    given = parser.parse_args()
    model = given.model or demo_model.ensure()
    ids = text(AutoTokenizer.from_pretrained(model))
    perplexity(model, ids[: given.tokens], given.budgets, given.segment, given.stride)


if __name__ == "__main__":
    main()
