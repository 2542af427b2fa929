"""Kernels of layers that fold tokens into a state (`engine.attention.recurrent.states`)."""
