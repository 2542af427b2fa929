"""Hidden states of a step between two stages, around its kernels, and tokens from the last stage to
the first.

Hidden states are at one address, where the layers of a stage read and change them in place: what
the stage before has made, or the embedding, becomes what is handed on. So a graph holds the layers
alone, and the next step takes the memory when this one's states are copied on their way.

The first stage takes tokens into its token table, behind the upload of the step that asks for them:
what can be done before they are there is done.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cuda.steps.shapes import SPARE_INTEGERS
from engine.cuda.steps.staging import Int32s, StepStaging
from engine.model import Decoder
from engine.model.decoder import Model
from engine.step.feedback import Feedback
from engine.step.lanes import flights_of
from engine.step.plan import StepPlan


class Handing:
    """What a stage takes from others and gives to them. With one stage there is nothing."""

    def __init__(self, model: Decoder, most_tokens: int, token_table: Tensor) -> None:
        """`most_tokens`: of a step, with its padding. The table's last entry is nobody's."""
        self.is_last = model.shard.is_last
        self._states: Tensor | None = None
        self._feedback: Feedback | None = None
        self._due: list[Int32s] = []
        self._table = token_table
        if (count := model.shard.stages) > 1:
            assert isinstance(model, Model), "our decoder has stages"
            self._states = model.embedding.new_zeros(most_tokens, model.config.hidden_size)
            self._stages = model.stages
            if self._stages.is_first:
                self._feedback = Feedback(count, len(token_table) - 1)
                room = len(token_table) + SPARE_INTEGERS  # A prompt may have several draws.
                self._staging = StepStaging(room, token_table.device, 2 * flights_of(count))

    def states(self, tokens: int) -> Tensor | None:
        """[T, H]. None: there is one stage."""
        return None if self._states is None else self._states[:tokens]

    def begin(self, plan: StepPlan) -> None:
        """A step begins. Its writes are in the token table, or are queued."""
        if self._feedback is not None:
            self._due = self._feedback.due(plan)

    def take(self, tokens: int) -> None:
        """The kernels of a step of so many tokens follow."""
        if self._feedback is not None:
            for slots in self._due:
                self._take_tokens(slots)
        elif self._states is not None:
            self._stages.receive(self._states[:tokens])

    def give(self, tokens: int) -> None:
        """The kernels are queued."""
        if self._states is not None and not self.is_last:
            self._stages.send(self._states[:tokens])

    def give_tokens(self, slots: Tensor) -> None:
        """The draw of these slots is queued, which puts its tokens into the table."""
        if self._states is not None and self.is_last:
            self._stages.send(self._table[slots.long()])

    def pass_on(self) -> None:
        """A step without tokens: one row says that it is done so far."""
        self.take(1)
        self.give(1)

    def _take_tokens(self, slots: Int32s) -> None:
        self._staging.begin()
        places = self._staging.add(slots)
        self._staging.upload()
        tokens = torch.empty_like(places)
        self._table[places.long()] = self._stages.receive(tokens)
