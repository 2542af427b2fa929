"""What a worker and the child process of a store send each other: JSON, a message at a time."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Final, TypeVar

LOOKUP: Final = "lookup"
LOAD: Final = "load"
STORE: Final = "store"


@dataclass(slots=True)
class Opening:
    """The first message to the child."""

    address: str
    memory_fds: list[int]
    """The memory files of all ranks' host slots."""
    num_slots: int
    slot_bytes: int
    fingerprint: str
    heads: list[tuple[int, int]]
    """For each rank the KV heads whose pages it has, [first, end)."""
    pages: int
    secret_file: str = ""
    failpoints: str = ""


@dataclass(slots=True)
class Question:
    """Work for the child."""

    number: int
    verb: str
    keys: list[str]
    """Keys of objects, hexadecimal."""
    slots: list[list[int]] = field(default_factory=list)
    """For each, the host slots of its pages, the same at all ranks."""


@dataclass(slots=True)
class Answer:
    """What became of it. The answer to the opening has number 0."""

    number: int
    good: list[bool] = field(default_factory=list)
    """For each object: it is there, it was loaded whole, or it was stored."""
    damaged: int = 0
    """Objects that were not what their name says. They are removed."""
    seconds: float = 0.0
    error: str = ""


Message = TypeVar("Message", Opening, Question, Answer)


def send(connection: Connection, message: Opening | Question | Answer) -> None:
    """Sends a message. Raises OSError if the other end is gone."""
    connection.send_bytes(json.dumps(asdict(message)).encode())


def receive(connection: Connection, kind: type[Message]) -> Message:
    """Waits for a message. Raises EOFError or OSError if the other end is gone."""
    return kind(**json.loads(connection.recv_bytes()))
