"""The contract of a step: what the scheduler asks of the device, and what comes back."""
