"""The OpenAI-compatible HTTP API, on the same generations as the gRPC API.

`schema` reads requests. `completions` and `chat` turn them into generations and write the form of
each API's answers. `reply` runs the generations and joins the parts. `server` is the process's
HTTP port. What is no matter of this API is in `router.doors.http`.
"""
