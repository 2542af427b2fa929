"""The executor: runs planned steps on the device, one after the other.

`launch` returns at once. The device works through launched steps like a CUDA stream. On a CPU the
stream is one thread, so the step loop plans the next step while this one computes, by the same
rules as on a GPU.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention import AttentionBackend, AttentionBatch
from engine.masks.rules import words_of
from engine.model import Model
from engine.pages.kv_pool import KvPool
from engine.sampling import Masks, Sampler, SampleResult, score
from engine.schedule.step import ScorePlan, ScoreResult, StepPlan, StepResult
from telemetry import failpoints

SCORE_ROWS = 256
"""Most positions whose logits are held at once when a prompt is scored."""


Launched = Future[StepResult]
"""A launched step. It is done when the device is done, and raises the device's error."""


class Executor(Protocol):
    """Runs steps."""

    def launch(self, plan: StepPlan) -> Launched:
        """Queues a step after those launched before. If the plan has masked rows, the draw of all
        its tokens waits for `sample`."""
        ...

    def mask_bits(self, count: int) -> NDArray[np.int32]:
        """Memory for `count` masks, from which they are sent to the device: [count, W]."""
        ...

    def sample(self, masks: Masks | None) -> None:
        """Queues the draw of the step launched last, which was planned with masked rows. None: it
        needs no masks any more."""
        ...

    def shutdown(self) -> None:
        """Waits for the launched steps and stops."""
        ...


class NullExecutor:
    """Computes nothing: every token is 0. It is for tests and for measuring the step loop alone."""

    def launch(self, plan: StepPlan) -> Launched:
        """A step that is done already."""
        count = len(plan.sample_slots)
        done: Future[StepResult] = Future()
        done.set_result(
            StepResult(np.zeros(count, np.int32), np.ones(count, np.bool_), None, None, None)
        )
        return done

    def mask_bits(self, count: int) -> NDArray[np.int32]:
        """Masks of one word."""
        return np.zeros((count, 1), np.int32)

    def sample(self, masks: Masks | None) -> None:
        """Nothing to draw."""

    def shutdown(self) -> None:
        """Nothing to stop."""


class TorchExecutor:
    """Runs steps with PyTorch: the model over the paged pool, then the sampler.

    The token table holds the last token of every slot on the device, so a step can be launched
    before the host has read the tokens of the one before.
    """

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        attention: AttentionBackend,
        sampler: Sampler,
        max_slots: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._sampler = sampler
        self._device = device
        self._token_table = torch.zeros(max_slots, dtype=torch.int64, device=device)
        self._masks: Future[Masks | None] | None = None
        """Masks of the step launched last, for which the device's thread waits."""
        self._stream = ThreadPoolExecutor(1, thread_name_prefix="baton-device")

    def launch(self, plan: StepPlan) -> Launched:
        """Queues the step on the device's thread."""
        self._masks = Future() if plan.masked.size else None
        return self._stream.submit(self._run, plan, self._masks)

    def mask_bits(self, count: int) -> NDArray[np.int32]:
        """New memory."""
        return np.empty((count, words_of(self._sampler.vocab_size)), np.int32)

    def sample(self, masks: Masks | None) -> None:
        """Hands the masks to the device's thread."""
        assert self._masks is not None, "the step launched last has no masked row"
        self._masks.set_result(masks)

    def shutdown(self) -> None:
        """Waits for the steps launched and ends the thread."""
        self._stream.shutdown(wait=True)

    @torch.inference_mode()
    def _run(self, plan: StepPlan, masks: Future[Masks | None] | None = None) -> StepResult:
        failpoints.hit("engine.step")
        if plan.copy_source.size:
            self._pool.copy_pages(self._upload(plan.copy_source), self._upload(plan.copy_target))
        if plan.write_slots.size:
            self._token_table[self._upload(plan.write_slots)] = self._upload(plan.write_tokens)
        if plan.num_tokens == 0:
            return _empty_result()
        hidden = self._forward(plan)
        scores = tuple(self._score(hidden, wanted) for wanted in plan.scores)
        if plan.sample is None:
            return _empty_result(scores)
        logits = self._model.logits(hidden[self._upload(plan.sample_tokens)])
        drawn = self._sampler.sample(logits, plan.sample, masks.result() if masks else None)
        self._token_table[self._upload(plan.sample_slots)] = drawn.tokens
        return _to_host(drawn, scores)

    def _forward(self, plan: StepPlan) -> Tensor:
        token_ids = self._upload(plan.token_ids)
        if plan.num_decodes:
            decoding = self._upload(plan.row_slots[: plan.num_decodes])
            token_ids[: plan.num_decodes] = self._token_table[decoding]
        self._attention.begin(self._attention_batch(plan))
        hidden: Tensor = self._model(token_ids, self._upload(plan.positions), self._attention)
        return hidden

    def _attention_batch(self, plan: StepPlan) -> AttentionBatch:
        rows = np.repeat(np.arange(len(plan.row_slots)), plan.query_lens)
        page_index, offsets = np.divmod(plan.positions, self._pool.page_size)
        return AttentionBatch(
            query_lens=plan.query_lens,
            context_lens=plan.context_lens,
            num_decodes=plan.num_decodes,
            page_table=self._upload(plan.page_table),
            token_pages=self._upload(plan.page_table[rows, page_index]),
            token_offsets=self._upload(offsets),
        )

    def _score(self, hidden: Tensor, wanted: ScorePlan) -> ScoreResult:
        """Scores a prompt in chunks of rows, since a long prompt's logits would not fit at once."""
        parts = []
        next_ids = self._upload(wanted.next_ids)
        for start in range(0, len(next_ids), SCORE_ROWS):
            ids = next_ids[start : start + SCORE_ROWS]
            first = wanted.first_token + start
            parts.append(
                score(self._model.logits(hidden[first : first + len(ids)]), ids, wanted.top_n)
            )
        return ScoreResult(
            wanted.next_ids,
            torch.cat([part.logprob for part in parts]).cpu().numpy(),
            torch.cat([part.top_ids for part in parts]).cpu().numpy().astype(np.int32),
            torch.cat([part.top_logprobs for part in parts]).cpu().numpy(),
        )

    def _upload(self, array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device, non_blocking=True)


def _empty_result(scores: tuple[ScoreResult, ...] = ()) -> StepResult:
    return StepResult(np.zeros(0, np.int32), np.zeros(0, np.bool_), None, None, None, scores)


def _to_host(drawn: SampleResult, scores: tuple[ScoreResult, ...]) -> StepResult:
    return StepResult(
        tokens=drawn.tokens.cpu().numpy().astype(np.int32),
        finite=drawn.finite.cpu().numpy(),
        logprobs=None if drawn.logprob is None else drawn.logprob.cpu().numpy(),
        top_ids=None if drawn.top_ids is None else drawn.top_ids.cpu().numpy().astype(np.int32),
        top_logprobs=None if drawn.top_logprobs is None else drawn.top_logprobs.cpu().numpy(),
        scores=scores,
    )
