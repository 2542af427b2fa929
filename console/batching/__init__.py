"""`baton batch`: files of requests in OpenAI's batch format."""
