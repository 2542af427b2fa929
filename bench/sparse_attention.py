"""What sparse attention costs in quality: perplexity, and whether a needle is found.

python -m bench.sparse_attention [perplexity|needle] [--budgets N ...] [--segment N]
    [--stride N] [--tokens N] [--lengths N ...]
python -m bench.sparse_attention steps --help       what a step takes: `bench.sparse_steps`

The steps are a worker's own (`TorchSteps` with the hook `quest` of `examples/hook-quest`), driven
one by one. All budgets are rows of the same steps. The text is `bench/texts/long.txt`: Baton's own
pages, as they were in November 2026.

    perplexity  Segments lie in the text, one every `--stride` tokens. What lies before a segment is
                a prompt. Each of its tokens is a decode row whose token is forced to be the text's.
                All segments run in the same steps; with `--segment 8000 --stride 8000` there is
                one, of the whole text. Dense figures are of the same tokens, in a prompt.
    needle      A sentence with a number lies at some depth in the text, which is a prompt. A
                question and the beginning of its answer are decoded. Then the number's tokens are
                forced and scored. Found: each of them was the likeliest.
"""

from __future__ import annotations

import argparse
import hashlib
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

from bench import sparse_steps
from bench.sparse_steps import quest
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
LENGTHS = (2048, 4096, 8000)
DEPTHS = (0.1, 0.5, 0.9)
CITIES = ("Trondheim", "Ljubljana", "Valparaiso")
DENSE = 0
Ints = NDArray[np.int32]


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
        self._steps = torch_steps(config, loaded, pools, [quest({})])
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


def _tables(rows: int, shared: int, count: int) -> Ints:
    """[R, count]: `shared` pages that all rows have, then those of each row."""
    own = [_pages(1 + count + row * count, count)[shared:] for row in range(rows)]
    return np.stack([np.concatenate([_pages(1, shared), each]) for each in own])


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


# -- perplexity -----------------------------------------------------------------------------------


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


# -- needles --------------------------------------------------------------------------------------


class Needle(NamedTuple):
    """A prompt with a needle, and what follows it."""

    prompt: list[int]
    question: list[int]
    answer: list[int]


def needle_at(tokenizer: Any, ids: Sequence[int], length: int, index: int) -> Needle:
    """The text cut to `length` tokens in all, with a needle at one of `DEPTHS`."""
    city, number = CITIES[index], str(4127 + 911 * index)
    says = f"The secret number of the harbour of {city} is"

    def tokens(words: str) -> list[int]:
        found: list[int] = tokenizer(words)["input_ids"]
        return found

    hidden = tokens(f"\n\n{says} {number}.\n\n")
    question = tokens(
        f"\n\nQuestion: What is the secret number of the harbour of {city}?\nAnswer: {says}"
    )
    answer = tokens(f" {number}")
    room = (length - len(question) - len(answer) - len(hidden)) // PAGE * PAGE
    room -= len(hidden) % PAGE  # The prompt fills whole pages.
    at = int(DEPTHS[index] * room)
    return Needle([*ids[:at], *hidden, *ids[at:room]], question, answer)


def needles(
    model: Path, tokenizer: Any, ids: Sequence[int], lengths: Sequence[int], budgets: Sequence[int]
) -> None:
    """Prints, for each length and budget, how many needles are found, and how likely they are."""
    count = -(-(max(lengths) + PAGE) // PAGE)
    every = [DENSE, *budgets]
    rig = Rig(model, len(every), max(lengths) + PAGE)
    print(f"| tokens | {' | '.join(_name(budget) for budget in every)} |", flush=True)
    print("|---|" + "---|" * len(every), flush=True)
    for length in lengths:
        results = [
            _find(rig, needle_at(tokenizer, ids, length, index), count, every)
            for index in range(len(DEPTHS))
        ]
        cells = []
        for column in range(len(every)):
            found = sum(result[column][0] for result in results)
            likely = math.exp(sum(result[column][1] for result in results) / len(results))
            cells.append(f"{found} of {len(results)}, p {likely:.2g}")
        print(f"| {length} | {' | '.join(cells)} |", flush=True)


def _name(budget: int) -> str:
    return f"reads {budget}" if budget else "reads all"


def _find(rig: Rig, needle: Needle, count: int, budgets: Sequence[int]) -> list[tuple[bool, float]]:
    """For each budget whether the needle is found, and log p of its number."""
    full = len(needle.prompt) // PAGE
    tables = _tables(len(budgets), full, count)
    rig.prefill(needle.prompt[: full * PAGE], tables[0])
    follows = [*needle.prompt[full * PAGE :], *needle.question]
    found, log_p = [True] * len(budgets), [0.0] * len(budgets)
    start = full * PAGE
    for offset, token in enumerate([*follows, *needle.answer[:-1]]):
        rows = len(budgets)
        places = np.full(rows, start + offset)
        logits = rig.decode(np.full(rows, token, np.int32), places, tables, budgets)
        wanted = offset - len(follows) + 1
        if wanted < 0:
            continue
        expected = needle.answer[wanted]
        for row, each in enumerate(logits.log_softmax(-1)):
            found[row] &= int(each.argmax()) == expected
            log_p[row] += float(each[expected])
    return list(zip(found, log_p, strict=True))


def main() -> None:
    """Prints the tables."""
    if sys.argv[1:2] == ["steps"]:
        sparse_steps.main(sys.argv[2:])
        return
    from transformers import AutoTokenizer

    from serving.models import demo_model

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("perplexity", "needle"))
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; else SmolLM2")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--segment", type=int, default=SEGMENT)
    parser.add_argument("--stride", type=int, default=STRIDE)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    given = parser.parse_args()
    model = given.model or demo_model.ensure()
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = text(tokenizer)
    if given.what != "needle":
        perplexity(model, ids[: given.tokens], given.budgets, given.segment, given.stride)
    if given.what != "perplexity":
        needles(model, tokenizer, ids, given.lengths, given.budgets)


if __name__ == "__main__":
    main()
