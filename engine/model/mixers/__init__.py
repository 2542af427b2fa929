"""Mixers: the parts of a layer that let tokens read from those before them. Attention is one.

A kind is its features in `config.py`, a file here, and one in `engine.cuda.mixers`.
"""
