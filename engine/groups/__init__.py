"""Groups: layers whose state lives equally long share pages."""
