"""`baton fence`: the end of workers that nobody has seen."""
