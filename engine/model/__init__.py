"""The models: what they are made of, their forward pass, and how weights get into them."""

from engine.model.config import ModelConfig, ModelError, UnsupportedModelError
from engine.model.llama import Model
from engine.model.loading import LoadedModel, load_model

__all__ = [
    "LoadedModel",
    "Model",
    "ModelConfig",
    "ModelError",
    "UnsupportedModelError",
    "load_model",
]
