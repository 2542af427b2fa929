"""Baton: disaggregated LLM serving. The public face: stubs, clients, settings, command line."""

__version__ = "0.1.0"
