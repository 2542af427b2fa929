"""A worker on several hosts: the leader has rank 0, and each other host has an agent."""
