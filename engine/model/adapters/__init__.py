"""What an adapter's files mean to a model: peft's format, and where its pairs add."""
