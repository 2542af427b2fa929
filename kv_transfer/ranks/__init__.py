"""Hand-off where several processes (ranks) hold a pool together: one transport agent a rank."""
