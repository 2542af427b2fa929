"""A request between its door and the dispatcher: bounds, tokenizing, answers."""
