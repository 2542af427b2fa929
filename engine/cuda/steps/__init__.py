"""How a step gets to a GPU: its shape, its packed integers, and the inputs that they become."""
