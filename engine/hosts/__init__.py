"""A worker's ranks on several hosts: sockets, store, and what rank 0 needs of agents."""
