"""Families whose layers differ in kind: some attend, others fold tokens into a state."""
