"""Which requests get slots and pages, and what the next step does."""
