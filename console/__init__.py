"""The `baton` command and what its commands share."""
