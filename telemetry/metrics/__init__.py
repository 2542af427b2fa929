"""The metrics of router and worker processes."""
