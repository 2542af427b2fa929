"""A program of somebody who installed the client alone: asks a router, and prints what it saw.

Arguments: the router's address, then names of packages to look for.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import baton.client
from baton import AsyncClient, Client
from baton.errors import InvalidRequestError

PROMPT = "The quick brown fox"
assert (AsyncClient, Client) == (baton.client.AsyncClient, baton.client.Client)


def ask(client: Client) -> dict[str, Any]:
    """The same greedy answer at once and as a stream, and the fields that a refusal names."""
    said: dict[str, Any] = {}
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    said["whole"] = client.generate(PROMPT, **options).text
    with client.stream(PROMPT, **options) as stream:
        said["deltas"] = [delta.text for delta in stream]
    try:
        client.generate(PROMPT, temperature=-1)
    except InvalidRequestError as error:
        said["refused"] = [violation.field for violation in error.violations]
    return said


def without_a_server() -> str:
    """What is said to somebody who wants a model in this process."""
    try:
        from baton import LLM
    except ImportError as error:
        return str(error)
    return f"there is {LLM}"


with Client(sys.argv[1], timeout_s=60) as client:
    said = ask(client)
found = [name for name in sys.argv[2:] if importlib.util.find_spec(name)]
print(json.dumps({**said, "no LLM": without_a_server(), "found": found}))
