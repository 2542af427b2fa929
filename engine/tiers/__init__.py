"""Tiers below the KV pool: pages that the pool evicts are kept in host memory and in stores."""
