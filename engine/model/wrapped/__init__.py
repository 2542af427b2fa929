"""Decoders without a file among the families: transformers' own code over our pages.

1. `classes` finds the class, and `recording` runs it once without numbers: what its attention asks
   for is the model's config. What cannot run here is refused then, before weights are read.
2. `tensors` says which tensors of a checkpoint fill it, and `loading` does.
3. `decoder` runs it: its attention is ours (`interfaces`), and so are its products (`linears`).
"""
