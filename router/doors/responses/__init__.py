"""OpenAI's Responses API, on the same generations as chats.

`items` and `schema` read a request into the turns of a chat. `writer` writes the answer's items and
events. `store` keeps answers in a file, where an operator wants it; `conversation` finds the
turns before a request in it. `method` and `pages` are what the routes call.
"""
