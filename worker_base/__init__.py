"""What the prefill and the decode service share."""
