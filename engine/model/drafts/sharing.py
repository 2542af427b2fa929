"""What draft heads share that stand beside the model whose parts they use."""

from __future__ import annotations

from torch import nn

from engine.model.decoder import Model
from engine.model.linear import RmsNorm


class SharingHead(nn.Module):
    """A head over a model, with norms of its own."""

    norms: nn.ModuleDict

    def __init__(self, model: Model | None) -> None:
        """`model`: None where only the shapes are wanted."""
        super().__init__()
        self._model = [model]  # Not a part of the head.

    @property
    def _target(self) -> Model:
        model = self._model[0]
        assert model is not None
        return model

    def norm_of(self, name: str) -> RmsNorm:
        """One of its own."""
        norm = self.norms[name]
        assert isinstance(norm, RmsNorm)
        return norm
