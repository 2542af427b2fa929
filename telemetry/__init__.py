"""Spans, metrics and logs; every name in one file."""
