"""Adapters beside one model on one GPU: output tokens a second with rows of several, of one and of
none, beside an engine that takes none.

python -m bench.adapters [--rank 16] [--adapters 8] [--cases CASE ...] [--repeats 1] [--json FILE]

Dummy weights and dummy pairs for every product of attention and feed-forwards of the 8B shape.
Goals: one row -8 %, 64 rows of 8 adapters -10 %, 256 rows and long prompts -9 %, no row with one
-1 %. The first token of a prompt whose adapter is in host memory alone: 3 ms later with rank 16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.engine import CASES as OF_ENGINE
from bench.engine import GREEDY, SHAPE, Case, Watch, add_engine_options, build, free_memory
from bench.harness import table, write_json
from engine.adapters.types import Adapter, LowRank
from engine.engine import Engine
from engine.types import Request, StopRules

DEFAULT = ("decode-1", "64x1024+256")
CASES = {
    "decode-1": Case(1, 128, 256, 0, 0, 0),
    **{name: OF_ENGINE[name] for name in ("64x1024+256", "decode-256", "prefill-8192")},
}
FIRST_TOKEN = Case(1, 128, 1, 0, 0, 0)


def shapes() -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the 8B shape's products, by name."""
    own = {
        **{f"self_attn.{name}_proj": size for name, size in
           {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}.items()},
        **{f"mlp.{name}_proj": (14336, 4096) for name in ("gate", "up")},
        "mlp.down_proj": (4096, 14336),
    }  # fmt: skip
    return {f"model.layers.{i}.{name}": size for i in range(32) for name, size in own.items()}


def load(engine: Engine, count: int, rank: int) -> list[bytes]:
    """Dummy adapters; their digests."""
    draw = torch.Generator().manual_seed(0)
    modules = {
        name: LowRank(
            (0.01 * torch.randn(rank, inputs, generator=draw)).bfloat16().pin_memory(),
            (0.01 * torch.randn(outputs, rank, generator=draw)).bfloat16().pin_memory(),
            1.0,
        )
        for name, (outputs, inputs) in shapes().items()
    }
    made = [Adapter(bytes([i]) * 32, modules, rank) for i in range(1, count + 1)]
    return [engine.adapters.add(f"a{i}", own).digest for i, own in enumerate(made)]


def rate(engine: Engine, case: Case, digests: list[bytes], seed: int) -> float:
    """Output tokens a second; request i has digest i, in turns."""
    draw = np.random.default_rng(seed)
    prompts = draw.integers(3, 32000, (case.prompts, case.prompt_tokens), dtype=np.int32)
    watch = Watch(case.prompts)
    begin = time.perf_counter()
    for i, prompt in enumerate(prompts):
        identity = seed.to_bytes(8, "big") + i.to_bytes(8, "big")
        rules = StopRules(case.output_tokens, ignore_eos=True)
        own = Request(identity, prompt, replace(GREEDY, seed=i), rules)
        engine.submit(replace(own, adapter=digests[i % len(digests)]), watch)
    assert watch.done.wait(600), "a case took more than ten minutes"
    assert not watch.failed, "a request failed"
    return case.counted_tokens / (time.perf_counter() - begin)


def first_token_ms(engine: Engine, digests: list[bytes]) -> float:
    """Median over three turns through the adapters; more than slots, so that none is there."""
    prompt = FIRST_TOKEN.prompt_tokens
    taken = [
        prompt / rate(engine, FIRST_TOKEN, [digest], 100 + turn * len(digests) + i)
        for turn in range(4)
        for i, digest in enumerate(digests)
    ]
    return 1000 * statistics.median(taken[len(digests) :])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=DEFAULT)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    add_engine_options(parser)
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    own = {"max_adapters": arguments.adapters, "max_adapter_rank": arguments.rank}
    for name, options in (("without", {}), ("with", own)):
        engine = build(arguments, model=SHAPE, options=options)
        every = load(engine, arguments.adapters + 1, arguments.rank) if options else []
        several, kinds = every[:-1], {name: [b""]}
        if options:
            kinds = {"none of them": [b""], "one": several[:1], "several": several}
        for kind, digests in kinds.items():
            for case_name in arguments.cases:
                case, turns = CASES[case_name], range(1, arguments.repeats + 2)
                rates = [rate(engine, case, digests, turn) for turn in turns]
                found.setdefault(case_name, {})[kind] = statistics.median(rates[1:])
        if options:
            there, away = (first_token_ms(engine, own) for own in (several[:1], every))
            found["first token ms"] = {"its adapter in a slot": there, "in host memory": away}
        engine.stop()
        del engine
        free_memory()
    rows = [["case", "rows with", "tokens a second", "of without"]]
    for case_name, values in found.items():
        for kind, value in values.items():
            share = f"{value / values['without']:.3f}" if "without" in values else ""
            rows.append([case_name, kind, f"{value:,.1f}", share])
    print(table(rows))
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
