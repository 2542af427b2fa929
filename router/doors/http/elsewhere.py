"""Paths of other APIs that are not served, and what there is instead."""

from __future__ import annotations

from typing import Final

_INSTEAD: Final = (
    ("/v1/audio", "Baton has no audio; its models read and write text"),
    ("/v1/realtime", "Baton has no audio; /v1/responses streams text"),
    ("/v1/images", "Baton makes no images; its models read and write text"),
    ("/v1/videos", "Baton makes no videos; its models read and write text"),
    ("/v1/moderations", "Baton has no moderation model of its own; ask a model that it serves"),
    (
        "/v1/fine_tun",
        "Baton trains nothing; workers serve what was trained elsewhere",
    ),
    ("/v1/assistants", "assistants are /v1/responses here: previous_response_id goes on"),
    ("/v1/threads", "threads are /v1/responses here: previous_response_id goes on"),
    ("/v1/conversations", "conversations are /v1/responses here: previous_response_id goes on"),
    ("/v1/vector_stores", "Baton has no search; give the texts to a model"),
    ("/v1/messages/batches", "there are no batches of messages; send them one by one"),
    ("/v1/complete", "the older API of texts is /v1/completions here, and messages /v1/messages"),
)
"""Beginnings of paths."""


def not_served(path: str, served: str) -> str:
    """The message for a path that is not served."""
    for beginning, instead in _INSTEAD:
        if path.startswith(beginning):
            return f"no such path: {instead}"
    return f"no such path: there are {served}"
