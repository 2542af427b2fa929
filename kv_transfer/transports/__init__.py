"""How bytes move: NIXL, loopback, or not at all."""
