"""Anthropic's Messages API, on the same generations as chats.

`blocks` reads contents and `schema` a request. `writer` writes the answer's blocks and events,
`dialect` the errors. `method` is what the routes call.
"""
