"""The vocabulary as a rank has it: all of each row of logits, or a part."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from engine.cuda.kernels import best_of_rows, greedy
from engine.cuda.ranks.best import best_of_part, best_of_ranks
from engine.cuda.ranks.collective import CudaCollective
from engine.model import Decoder
from engine.step.collective import Collective


class Kept(NamedTuple):
    """Where tokens go that were chosen."""

    slots: Tensor
    """[S] int32."""
    table: Tensor
    """int32, by slot."""


class Vocabulary(Protocol):
    """What ranks do together with logits. All call the same in the same order."""

    def best(self, logits: Tensor, kept: Kept | None = None) -> Tensor:
        """Finds the best token of each row of [S, P] logits, contiguous, with the result of
        `engine.cuda.kernels.greedy`; all ranks know them. `kept` takes the tokens."""
        ...

    def whole(self, logits: Tensor) -> Tensor:
        """Rank 0 gets whole rows; elsewhere what comes has no meaning."""
        ...

    def share(self, drawn: Tensor) -> Tensor:
        """Rank 0's numbers become those of all."""
        ...

    def end_without(self) -> None:
        """Ends a step that draws nothing."""
        ...


class WholeVocabulary:
    """The vocabulary of the only rank."""

    def best(self, logits: Tensor, kept: Kept | None = None) -> Tensor:
        """See `Vocabulary`."""
        return best_of_rows(logits) if kept is None else greedy(logits, *kept)

    def whole(self, logits: Tensor) -> Tensor:
        """See `Vocabulary`."""
        return logits

    def share(self, drawn: Tensor) -> Tensor:
        """See `Vocabulary`."""
        return drawn

    def end_without(self) -> None:
        """See `Vocabulary`."""


class VocabularyPart(NamedTuple):
    """The vocabulary of one of several ranks."""

    ranks: CudaCollective
    first_id: int
    """Token of its first column."""
    size: int
    """Tokens of all ranks."""

    def best(self, logits: Tensor, kept: Kept | None = None) -> Tensor:
        """See `Vocabulary`."""
        bests = self.ranks.gather_on_all(best_of_part(logits, self.first_id))
        return best_of_ranks(bests, *(kept or (None, None)))

    def whole(self, logits: Tensor) -> Tensor:
        """See `Vocabulary`."""
        return self.ranks.gather(logits, self.size)

    def share(self, drawn: Tensor) -> Tensor:
        """See `Vocabulary`."""
        self.ranks.broadcast(drawn)
        return drawn

    def end_without(self) -> None:
        """See `Vocabulary`."""
        self.ranks.barrier()


def vocabulary_of(collective: Collective, first_id: int, size: int) -> Vocabulary:
    """The vocabulary of a rank: its first column is this token's, and all ranks have so many."""
    if collective.size == 1:
        return WholeVocabulary()
    assert isinstance(collective, CudaCollective)
    return VocabularyPart(collective, first_id, size)


def vocabulary_of_model(model: Decoder) -> Vocabulary:
    """A rank's part of the model's vocabulary."""
    config = model.config
    return vocabulary_of(model.collective, model.shard.vocab(config).start, config.vocab_size)
