"""Files of requests in OpenAI's batch format: lines, results and how they are run."""
