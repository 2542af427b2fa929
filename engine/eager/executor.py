"""The executor that runs steps with PyTorch, on a thread of its own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.eager.late import LateStep, TorchLateRows
from engine.eager.steps import TorchSteps
from engine.sampling import Sampler, SampleResult, score
from engine.sampling.pooling import pooled_states
from engine.step.executor import Launched
from engine.step.plan import ScorePlan, ScoreResult, StepPlan, StepResult
from engine.step.sampling import Masks, SamplePlan, words_of
from faults import failpoints


class TorchExecutor:
    """Runs steps with PyTorch: the model over the paged pool, then the sampler."""

    def __init__(self, steps: TorchSteps, sampler: Sampler) -> None:
        self.steps = steps
        self._sampler = sampler
        self.late = TorchLateRows(self._queue_late)
        self._masks: Future[Masks | None] | None = None
        """Masks of the step launched last, for which the device's thread waits."""
        self._stream = ThreadPoolExecutor(1, thread_name_prefix="baton-device")

    def shaped(self, plan: StepPlan) -> StepPlan:
        """Nothing to decide: no step is padded."""
        return plan

    def launch(self, plan: StepPlan) -> Launched:
        """Queues the step on the device's thread."""
        self._masks = Future() if plan.masked.size else None
        return self._stream.submit(self._run, plan, self._masks, self.late.launched(plan))

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
    def _run(
        self, plan: StepPlan, masks: Future[Masks | None] | None, late: LateStep
    ) -> StepResult:
        failpoints.hit("engine.step")
        steps = self.steps
        plan = steps.prepare(late.begin(plan))
        if plan.num_tokens == 0:
            steps.end_without_tokens()
            return self._with_failures(_empty_result())
        hidden = steps.forward(plan)
        late.computed(hidden)
        spoilt = steps.spoilt()
        scores = tuple(self._score(hidden, wanted) for wanted in plan.scores)
        pooled = pooled_states(plan, hidden).cpu().numpy() if len(plan.pools) else None
        if plan.sample is None:
            steps.end()
            empty = _empty_result(scores, pooled)
            return self._with_failures(_with_spoilt(empty, spoilt))
        if steps.reads_logits(plan):
            drawn = self._draw(steps.logits(hidden, plan), plan.sample, masks)
        else:
            drawn = steps.judge(*steps.best(hidden, plan))
        steps.keep(plan, drawn)
        result = replace(self._to_host(plan, drawn, scores), pooled=pooled)
        return self._with_failures(_with_spoilt(result, spoilt))

    def _queue_late(self, step: LateStep, plan: StepPlan) -> Launched:
        return self._stream.submit(self._draw_late, step, plan)

    @torch.inference_mode()
    def _draw_late(self, step: LateStep, plan: StepPlan) -> StepResult:
        """Draws the row that came late. If its step has failed, so has it."""
        if step.hidden is None or plan.sample is None:
            raise RuntimeError("the step of the late row has failed")
        drawn = self._draw(self.steps.logits(step.hidden, plan), plan.sample, None)
        self.steps.keep(plan, drawn)
        return self._to_host(plan, drawn, ())

    def _draw(
        self, logits: Tensor, plan: SamplePlan, masks: Future[Masks | None] | None
    ) -> SampleResult:
        verified, filled = self.steps.verification, masks.result() if masks else None
        if verified is None:
            return self._sampler.sample(logits, plan, filled)
        return self._sampler.verify(logits, plan, verified.draws, filled)

    def _with_failures(self, result: StepResult) -> StepResult:
        hooks = self.steps.hooks
        if hooks is None or not hooks.failures:
            return result
        return replace(result, hook_failures=hooks.failures)

    def _to_host(
        self, plan: StepPlan, drawn: SampleResult, scores: tuple[ScoreResult, ...]
    ) -> StepResult:
        result = StepResult(
            tokens=drawn.tokens.cpu().numpy().astype(np.int32),
            finite=drawn.finite.cpu().numpy(),
            logprobs=None if drawn.logprob is None else drawn.logprob.cpu().numpy(),
            top_ids=None if drawn.top_ids is None else drawn.top_ids.cpu().numpy().astype(np.int32),
            top_logprobs=None if drawn.top_logprobs is None else drawn.top_logprobs.cpu().numpy(),
            scores=scores,
        )
        verified = self.steps.verification
        if verified is None or drawn.counts is None:
            return result
        ids, ready = self.steps.next_drafts(plan) if plan.returns_drafts else (None, None)
        return replace(
            result,
            counts=drawn.counts.cpu().numpy().astype(np.int32),
            drafted=(verified.draws.valid - 1).clamp(min=0).cpu().numpy().astype(np.int32),
            next_drafts=None if ids is None else ids.cpu().numpy(),
            next_ready=None if ready is None else ready.cpu().numpy(),
        )

    def _score(self, hidden: Tensor, wanted: ScorePlan) -> ScoreResult:
        chunks = self.steps.scored(hidden, wanted)
        parts = [score(logits, ids, wanted.top_n) for logits, ids in chunks]
        return ScoreResult(
            wanted.next_ids,
            torch.cat([part.logprob for part in parts]).cpu().numpy(),
            torch.cat([part.top_ids for part in parts]).cpu().numpy().astype(np.int32),
            torch.cat([part.top_logprobs for part in parts]).cpu().numpy(),
        )


def _with_spoilt(result: StepResult, spoilt: Tensor | None) -> StepResult:
    return result if spoilt is None else replace(result, spoilt=spoilt.cpu().numpy())


def _empty_result(
    scores: tuple[ScoreResult, ...] = (), pooled: NDArray[np.float32] | None = None
) -> StepResult:
    nothing = np.zeros(0, np.int32), np.zeros(0, np.bool_)
    return StepResult(*nothing, None, None, None, scores, pooled=pooled)
