"""Expert groups on GPUs: one worker a GPU, and tokens that go through memory which all map."""
