"""`baton adapters`: the adapters of running workers."""
