"""Baton: disaggregated LLM serving. The public face: stubs, clients, settings, command line."""
