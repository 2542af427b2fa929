"""Which workers run a job."""
