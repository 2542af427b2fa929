"""The fetch services: they get KV pages of prompts from other workers, and give them to others."""
