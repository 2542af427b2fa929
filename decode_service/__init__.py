"""The decode service: it receives the KV of prompts and generates tokens."""
