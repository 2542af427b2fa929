"""Hidden states of a step between two stages, around its kernels.

They are at one address, where the layers of a stage read and change them in place: what the stage
before has made, or the embedding, becomes what is handed on. So a graph holds the layers alone, and
the next step takes the memory when this one's states are copied on their way.
"""

from __future__ import annotations

from torch import Tensor

from engine.model import Decoder
from engine.model.decoder import Model


class Handing:
    """A stage's hidden states. With one stage there are none, and nothing happens."""

    def __init__(self, model: Decoder, most_tokens: int) -> None:
        """`most_tokens`: of a step, with its padding."""
        self.is_last = model.shard.is_last
        self._states: Tensor | None = None
        if model.shard.stages > 1:
            assert isinstance(model, Model), "our decoder has stages"
            self._states = model.embedding.new_zeros(most_tokens, model.config.hidden_size)
            self._stages = model.stages

    def states(self, tokens: int) -> Tensor | None:
        """[T, H]. None: there is one stage."""
        return None if self._states is None else self._states[:tokens]

    def take(self, tokens: int) -> None:
        """The kernels of a step of so many tokens follow."""
        if self._states is not None and not self._stages.is_first:
            self._stages.receive(self._states[:tokens])

    def give(self, tokens: int) -> None:
        """The kernels are queued."""
        if self._states is not None and not self.is_last:
            self._stages.send(self._states[:tokens])

    def pass_on(self) -> None:
        """A step without tokens: one row says that it is done so far."""
        self.take(1)
        self.give(1)
