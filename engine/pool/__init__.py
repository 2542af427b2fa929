"""The memory of pages: how a pool stores K and V."""
