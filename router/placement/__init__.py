"""Selection of the workers that run a job."""
