"""Tokens a second of SmolLM2 on this CPU: ours beside transformers, side by side in one run.

python -m bench.throughput [--model PATH] [--output 64] [--alone 6] [--repeats 1]

Four ways through the same 32 prompts, every output of the same length, float32, greedy:

    ours, 1 at once             the first `--alone` prompts, one after another
    transformers, 1 at once     the same
    ours, 32 at once            all of them, submitted together
    transformers, one batch     all of them, left-padded

Rates are output tokens a second, prefill included. Threads are what OMP_NUM_THREADS says, for both;
every way runs once before it is measured, and the ways take turns, so that what else the machine
does meets all alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Event, Request, RequestFailed, SamplingParams, SequenceEnded, StopRules
from serving.models import demo_model

CROWD = 32
SHORTEST, LONGEST = 24, 128
GREEDY = SamplingParams(temperature=0.0)

Prompts = Sequence[Sequence[int]]


class Ours:
    """The engine, without its prefix cache: a repeat would find every prompt there."""

    def __init__(self, model: str) -> None:
        self._engine = Engine.build(
            EngineConfig(
                model=model,
                dtype="float32",
                device="cpu",
                num_pages=1024,
                max_sequences=CROWD,
                prefix_cache=False,
            )
        )
        self._engine.start()

    def run(self, prompts: Prompts, output: int) -> None:
        """All prompts together."""
        left, done = len(prompts), threading.Event()

        def sink(events: Sequence[Event]) -> None:
            nonlocal left
            assert not any(isinstance(event, RequestFailed) for event in events)
            left -= sum(isinstance(event, SequenceEnded) for event in events)
            if left == 0:
                done.set()

        stop = StopRules(output, ignore_eos=True)
        for prompt in prompts:
            ids = np.array(prompt, np.int32)
            self._engine.submit(Request(os.urandom(16), ids, GREEDY, stop), sink)
        done.wait()

    def stop(self) -> None:
        """Ends the engine."""
        self._engine.stop()


class Transformers:
    """The reference, with its own generation loop and cache."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def run(self, prompts: Prompts, output: int) -> None:
        """One left-padded batch."""
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        out = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            pad_token_id=0,
        )
        assert out.shape == (len(prompts), width + output)


def one_by_one(run: Callable[[Prompts, int], None]) -> Callable[[Prompts, int], None]:
    """The same way, each prompt after the one before it has ended."""

    def each(prompts: Prompts, output: int) -> None:
        for prompt in prompts:
            run([prompt], output)

    return each


def rate(run: Callable[[Prompts, int], None], prompts: Prompts, output: int) -> float:
    """Output tokens a second."""
    begin = time.perf_counter()
    run(prompts, output)
    return len(prompts) * output / (time.perf_counter() - begin)


def main() -> None:
    """Prints medians and their ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--alone", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    model = arguments.model or str(demo_model.ensure())
    rng = np.random.default_rng(0)
    lengths = rng.integers(SHORTEST, LONGEST + 1, CROWD)
    prompts = [rng.integers(3, 40_000, length).tolist() for length in lengths]
    few, output = prompts[: arguments.alone], arguments.output
    ours, theirs = Ours(model), Transformers(model)
    ways = {
        "ours, 1 at once": (one_by_one(ours.run), few),
        "transformers, 1 at once": (one_by_one(theirs.run), few),
        "ours, 32 at once": (ours.run, prompts),
        "transformers, one batch": (theirs.run, prompts),
    }
    for run, subset in ways.values():
        run(subset[:2] if subset is few else subset, 4)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    print(f"threads {torch.get_num_threads()}, load average before {os.getloadavg()[0]:.2f}")
    for _ in range(arguments.repeats):
        for name, (run, subset) in ways.items():
            rates[name].append(rate(run, subset, output))
    ours.stop()
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name, found in rates.items():
        spread = ", ".join(f"{one:.1f}" for one in found)
        print(f"{name:24} {medians[name]:8.1f} tokens/s   ({spread})")
    alone, one, crowd, batch = (medians[name] for name in ways)
    print(f"1 at once: {alone / one:.2f}x transformers")
    print(f"32 at once: {crowd / one:.2f}x one after another, {crowd / batch:.2f}x its batch")
    print(f"load average after {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
