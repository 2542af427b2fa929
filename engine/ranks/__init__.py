"""Ranks: several processes on one host that hold and run one model together."""
