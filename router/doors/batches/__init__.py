"""OpenAI's files and batches: files of requests, which the router runs when nobody else asks.

A file's content lies in a folder, under a random name that is neither its id nor the name that its
owner gave it. All else is in a SQLite file beside the folder.
"""
