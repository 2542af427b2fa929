"""A model whose layers have one part each."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.model import LoadedModel, Model


def halved(loaded: LoadedModel) -> LoadedModel:
    """The same weights, with a layer for each mixer and one for each feed-forward."""
    layers = []
    for layer in loaded.config.layers:
        norms = layer.norms
        mixer = replace(norms, before_feed_forward=None, after_feed_forward=None)
        forward = replace(norms, before_mixer=None, after_mixer=None)
        layers.append(replace(layer, feed_forward=None, norms=mixer))
        layers.append(replace(layer, mixer=None, norms=forward))
    config = replace(loaded.config, layers=tuple(layers))
    model = Model(config, torch.float32, torch.device("cpu"))
    for place, whole in enumerate(loaded.model.layers):
        weights = whole.state_dict()
        for half in (model.layers[2 * place], model.layers[2 * place + 1]):
            half.load_state_dict({name: weights[name] for name in half.state_dict()})
    for name in ("embedding", "head", "norm.weight"):
        model.get_parameter(name).copy_(loaded.model.get_parameter(name))
    return replace(loaded, model=model, config=config)
