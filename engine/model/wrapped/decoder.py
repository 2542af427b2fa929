"""A decoder of transformers, as the engine runs it.

All tokens of a step are one sequence to the class, [1, T], at the positions of their own
sequences. Only attention reads other tokens, and that is ours. The head is the class's own, with
what it does to logits: its body is replaced by `Given`, which answers with hidden states that were
computed before.

Shapes: T tokens of a step, H hidden size, R rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.model.best import best_of_parts
from engine.model.config import ModelConfig
from engine.model.experts.counting import PairCount
from engine.model.linear import Linear
from engine.model.precision.base import Kernels
from engine.model.shard import Shard
from engine.model.wrapped import interfaces
from engine.model.wrapped.attention import Triple
from engine.model.wrapped.linears import set_module
from engine.model.wrapped.recording import Attended, Record
from engine.step.attention import AttentionSpec, Specs, StepAttention
from engine.step.collective import Alone, Collective
from engine.step.dispatch import STAY, Dispatch


class Given(nn.Module):
    """Stands for a body whose hidden states are known."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        """The output of the body."""
        if issubclass(self._output, tuple):
            return (self.hidden,)
        return self._output(last_hidden_state=self.hidden)


class WrappedModel(nn.Module):
    """A decoder whose code is transformers'."""

    def __init__(
        self,
        config: ModelConfig,
        causal: Any,
        record: Record,
        shard: Shard,
        collective: Collective | None = None,
    ) -> None:
        """Takes a class of transformers apart.

        Args:
            config: what its dry run has found.
            causal: the class, with its weights.
            record: of its dry run.
            shard: the part that this rank has.
            collective: the ranks.
        """
        super().__init__()
        self.config = config
        self.shard = shard
        self.collective = collective or Alone()
        self.dispatch: Dispatch = STAY
        self.pairs: PairCount | None = None
        self.body = causal.get_submodule(record.body)
        self.causal = causal
        self._specs = tuple(_spec(causal, each, shard) for each in record.calls)
        self._calls = interfaces.Calls()
        for call in record.calls:
            setattr(call.module, interfaces.CALLS, self._calls)
        for module in causal.modules():
            if isinstance(module, Triple):
                module.calls = self._calls
        interfaces.use(causal, interfaces.RUN)
        self._given = Given(record.output)
        set_module(causal, record.body, self._given)

    @property
    def attention_specs(self) -> Specs:
        """Attention of each layer."""
        return self._specs

    @property
    def linears(self) -> list[Linear]:
        """All products of the body that are ours."""
        return [module for module in self.modules() if isinstance(module, Linear)]

    def finish(self, kernels: Kernels | None = None) -> None:
        """Makes the filled weights ready for products. `kernels`: as in `Model`."""
        for linear in self.linears:
            linear.method.finish(kernels)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """[T] ids at [T] positions -> [T, H], after the last norm. See `Model`."""
        self._calls.begin(attention)
        out = self.body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = out[0][0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, vocab] float32."""
        return self.made(hidden).float()

    def made(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, vocab], in the dtype of the class."""
        self._given.hidden = hidden[None]
        ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
        logits: Tensor = self.causal(input_ids=ids, use_cache=False).logits[0]
        self._given.hidden = None
        return logits

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[R, H] -> the best tokens and whether the logits are finite. Every rank has the whole
        head."""
        return best_of_parts(self.logits(hidden), 0, Alone())


def _spec(causal: nn.Module, call: Attended, shard: Shard) -> AttentionSpec:
    sinks = causal.get_parameter(call.sinks).detach() if call.sinks else None
    if sinks is not None:
        sinks = sinks[shard.even(call.heads).slice]
    return AttentionSpec(call.scale, call.window, call.soft_cap, sinks)
