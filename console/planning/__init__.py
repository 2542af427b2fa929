"""`baton plan`: how many workers of which role, by simulation."""
