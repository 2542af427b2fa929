"""Stores of KV pages outside a worker's memory, each in a child process."""
