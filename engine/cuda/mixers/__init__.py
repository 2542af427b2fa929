"""Mixers of layers with fused kernels, over the modules of `engine.model.mixers`."""
