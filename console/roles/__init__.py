"""`baton role`: the roles of running workers."""
