"""Numbers of fewer bits: how values are rounded to them, and what comes back."""
