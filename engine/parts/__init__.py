"""The parts of an engine, and how they are made."""
