"""How weights are kept and multiplied: in the model's dtype, in FP8, in INT4.

A *format* (`formats/`) turns a checkpoint's tensors into values, scales and zero points. A *method*
owns the storage and the product of a `Linear`, and says which input it takes.
"""
