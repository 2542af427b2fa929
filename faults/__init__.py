"""Makes a process fail at places that it names, for tests."""
