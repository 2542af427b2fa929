"""Anthropic's Messages API, on the same generations as chats.

`blocks` reads contents and `schema` a request. `teller` writes the answer's blocks and events,
`dialect` the errors. `method` is what the routes call.
"""
