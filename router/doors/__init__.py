"""The doors for requests: gRPC, and the OpenAI API (`openai`) over HTTP (`http`)."""
