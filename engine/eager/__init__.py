"""Steps that PyTorch runs one operation at a time, and ranks that join a group of its own."""
