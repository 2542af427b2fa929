"""Draft heads: small networks that guess tokens from the hidden states of a model.

A head reads hidden states of some layers (*taps*) and the tokens that follow, and has a layer with
KV of its own. Life of a head:

1. `formats` reads what its checkpoint says, and compares it with the model. Nothing of the weights
   is read before it fits.
2. `loading` builds the head and fills its weights.
3. Behind each step the runtime gives it the taps of the step's tokens. It keeps its own K and V of
   these, and guesses what follows.
"""
