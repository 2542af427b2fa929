"""Adapters on a GPU: what they add to products, in two kernels beside each product."""
