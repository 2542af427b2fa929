"""The front doors: admission, tokenizing, worker selection and failover. Runs without torch."""
