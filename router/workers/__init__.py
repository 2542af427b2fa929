"""The workers that are attached, and what each has left."""
