"""The models served, in Anthropic's form."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.doors.http.statuses import JSON


def model_of(name: str, created_s: int) -> JSON:
    """One model; `created_s` is a Unix time."""
    created = datetime.fromtimestamp(created_s, UTC).isoformat()
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def models_page(names: Sequence[str], created_s: int) -> JSON:
    """The only page of the list."""
    models = [model_of(name, created_s) for name in names]
    return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}
