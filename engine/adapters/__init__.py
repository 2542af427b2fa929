"""Low-rank adapters (LoRA) beside one model: which are loaded, who uses them, which the device has.

What a file of one means to a model is `engine.model.adapters`. A request names an adapter by the
digest of its content, so that one that is loaded again under the same name is another one.
"""
