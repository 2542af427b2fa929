"""Proofs that lost workers are gone: what this host's kernel knows, witnesses, and operators."""
