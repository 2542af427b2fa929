"""A model in the caller's process, without servers: a worker's engine behind a router's doors."""
