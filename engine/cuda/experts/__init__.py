"""Experts on a GPU: routing, sorting, products that read the weights of chosen experts only."""
