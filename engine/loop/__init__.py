"""The thread that runs steps."""
