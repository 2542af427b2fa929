"""Runs engines of two stages whose steps are those of a GPU, in Triton's interpreter: both stages'
CUDA executors in one process, without graphs. Their tokens are those of one stage with PyTorch.

Arguments as in `interpreted_executor`: a scratch folder, then models.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from unittest.mock import patch

import interpreted_ptx
import numpy as np
import torch
from engine_kit import GREEDY, Run, build, check_baseline, finish, running, submit
from interpreted_executor import OPTIONS, PROMPTS, SEEDED, patches, same
from test_stages import MODELS
from tiny_models import write_tiny_model
from torch import Tensor

from engine.engine import Engine
from engine.parts import building
from engine.parts.paging import make_pages, resolved, shard_of
from engine.ranks.ranks import NoRanks
from engine.ranks.steps import decode, encode
from engine.step.collective import Alone
from engine.types import SamplingParams


class Ring:
    """What one stage hands to the other."""

    waits_on_host = False

    def __init__(self, stage: int, on_the_way: tuple[deque[Tensor], deque[Tensor]]) -> None:
        self.is_first, self.is_last = stage == 0, stage == 1
        self._from, self._to = on_the_way[1 - stage], on_the_way[stage]

    def receive(self, x: Tensor) -> Tensor:
        return x.copy_(self._from.popleft())

    def send(self, x: Tensor) -> None:
        self._to.append(x.clone())


class FirstStage(NoRanks):
    """The other rank, whose part of a step is computed when it is launched."""

    def __init__(self, config) -> None:
        super().__init__()
        on_the_way: tuple[deque[Tensor], deque[Tensor]] = deque(), deque()
        self.stages = Ring(1, on_the_way)
        self._config, self._ring = config, Ring(0, on_the_way)

    def agree(self, revision: str, num_pages: int) -> int:
        config, device = self._config, torch.device("cpu")
        shard = shard_of(config, 1)
        loaded = building.load(config, device, Alone(), self._ring, shard=shard)
        assert loaded.revision == revision
        pools = make_pages(num_pages, config, loaded, device)
        config = resolved(config, loaded, pools.first)
        self._first = building.cuda_executor(config, loaded, pools, None, ())
        return num_pages

    def executor(self, own):
        launch = own.launch

        def both(plan):
            self._first.launch(decode(encode(plan))).exception()
            return launch(plan)

        own.launch = both
        return own


def staged(path: Path, **options) -> Engine:
    with patch("engine.engine._ranks", lambda config, *_: FirstStage(config)):
        return build(path, pp=2, cuda_graphs=False, **OPTIONS, **options)


TOKENS = 3


def answers(engine: Engine, sampling: SamplingParams) -> list[Run]:
    """Prompts with a shape and rows in two lanes; then a prompt without a shape."""
    runs = [submit(engine, ids, TOKENS, sampling=sampling, ignore_eos=True) for ids in PROMPTS]
    finish(*runs, timeout_s=900)
    runs.append(submit(engine, PROMPTS[2], 1, prompt_logprobs=True, ignore_eos=True))
    finish(runs[-1], timeout_s=900)
    check_baseline(engine)
    return runs


def scores(runs: list[Run]) -> list[float]:
    assert runs[-1].scored is not None
    return [record.logprob for record in runs[-1].scored.records]


def main() -> None:
    interpreted_ptx.teach()
    for model in sys.argv[2:]:
        options = MODELS[model] | ({} if model == "gemma3" else {"layers": 2})
        path = write_tiny_model(Path(sys.argv[1]) / model, tokenizer=False, **options)
        for sampling in (GREEDY, SEEDED)[: 2 if model == "llama" else 1]:
            with running(path, **OPTIONS) as plain:
                wanted = answers(plain, sampling)
            with patches():
                engine = staged(path)
                got = answers(engine, sampling)
                engine.stop()
            same(got, wanted)
            np.testing.assert_allclose(*map(scores, (got, wanted)), atol=1e-3)
        print(model, "equal", flush=True)


if __name__ == "__main__":
    main()
