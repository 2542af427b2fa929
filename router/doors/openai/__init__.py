"""The OpenAI-compatible HTTP API, on the same generations as the gRPC API.

`schema` reads requests, `completions` and `chat` turn them into generations and say how each API
writes what comes back, `reply` runs the generations and puts the pieces together, `edge` is where
HTTP begins and errors become statuses, `server` is the process's HTTP port.
"""
