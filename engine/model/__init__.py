"""The models: their configuration, their forward pass, and the loading of weights."""

from engine.model.config import ModelConfig, ModelError, UnsupportedModelError
from engine.model.decoder import Model
from engine.model.loading import Decoder, LoadedModel, load_model

__all__ = [
    "Decoder",
    "LoadedModel",
    "Model",
    "ModelConfig",
    "ModelError",
    "UnsupportedModelError",
    "load_model",
]
