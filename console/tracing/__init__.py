"""Traces of requests: read from a router, drawn as waterfalls."""
