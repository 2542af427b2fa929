"""The parts of a verify step that run on a GPU (`engine.speculation` has the rules)."""
