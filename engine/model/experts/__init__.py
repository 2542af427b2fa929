"""Feed-forwards of experts: routing, weights, products. One function for all families.

On a GPU `engine.cuda.experts` has kernels for the same.
"""
