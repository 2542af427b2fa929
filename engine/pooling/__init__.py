"""What is done with the last hidden states of a prompt in place of drawing a token."""
