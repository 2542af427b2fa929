"""Spans, metrics and logs. `telemetry.names` has all names."""
