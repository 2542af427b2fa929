"""Names that stand for several models, with weights: for comparing two of them on real requests.

A conversation stays with its model. It is known by how it begins: its first turn of the user's and
all before it, or the beginning of a text; and by its tenant. If its model has no workers, the
others share its requests, and those of the others stay where they are (weighted rendezvous hashing:
each model draws a number from the conversation and itself, and the largest takes it).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.inference.v1 import inference_pb2 as api

if TYPE_CHECKING:
    from router.jobs import ServedModel
    from router.visible import Visible

BEGINNING: Final = 256
"""Characters of a text, or ids, that name a conversation: more than instructions that all share
often have would be better, and less than a first question must do."""
_FORM: Final = "NAME=MODEL:WEIGHT+MODEL:WEIGHT"


Prompted = api.GenerationInput | api.TokenizeRequest


class SplitNamesError(ValueError):
    """What is stated is no name with weights; the message says why."""


class Share(NamedTuple):
    """A model behind a name."""

    model: str
    weight: float


class SplitNames:
    """All names of a router.

    Args:
        stated: each as `NAME=MODEL:WEIGHT+MODEL:WEIGHT`.

    Raises:
        SplitNamesError: one of them is not so.
    """

    def __init__(self, stated: Sequence[str] = ()) -> None:
        self._shares: dict[str, list[Share]] = {}
        for one in stated:
            name, _, shares = one.partition("=")
            if not name or not shares or name in self._shares:
                raise SplitNamesError(f"{one!r}: write {_FORM}, each name once")
            self._shares[name.strip()] = [_share(one, part) for part in shares.split("+")]
        for name, found in self._shares.items():
            models = [share.model for share in found]
            if len(set(models)) < len(models):
                raise SplitNamesError(f"{name}: names a model twice")
            if both := self._shares.keys() & set(models):
                rule = "cannot stand for others and be a model: give the model another served_name"
                raise SplitNamesError(f"{min(both)}: {rule}")

    @property
    def names(self) -> frozenset[str]:
        """All that stand for models."""
        return frozenset(self._shares)

    def model_for(self, request: Prompted, tenant: str, visible: Visible) -> str:
        """The model for a request's conversation; any other name is a model's already. One that
        stands for nothing that the caller may use is no name.

        Args:
            request: with the name and the prompt.
            tenant: whose conversation it is.
            visible: what the caller sees.
        """
        stated = self._shares.get(request.model, ())
        if not (shares := [share for share in stated if visible.may_use(share.model)]):
            return request.model
        known = {model.called for model in visible.models()}
        conversation = _beginning(request, tenant)
        there = [share for share in shares if share.model in known] or shares
        return max(there, key=lambda share: _drawn(share, conversation)).model

    def listed(self, models: Sequence[ServedModel]) -> list[ServedModel]:
        """The models, and the names that stand for some of them. A name promises what the least of
        its models does."""
        found, known = list(models), {model.called: model for model in models}
        for name, shares in self._shares.items():
            if there := [known[share.model] for share in shares if share.model in known]:
                least = min(there, key=lambda model: model.max_context_tokens)
                found.append(replace(least, name=name, adapter="", digest=b""))
        return found


NO_SPLIT_NAMES: Final = SplitNames()


def _beginning(request: Prompted, tenant: str) -> bytes:
    """Names the conversation of a request: a digest of how it begins."""
    digest = hashlib.sha256(tenant.encode() + b"\0")
    match request.WhichOneof("prompt"):
        case "chat":
            for message in request.chat.messages:
                digest.update(message.SerializeToString(deterministic=True))
                if message.role == api.ROLE_USER:
                    break
        case "token_ids":
            assert isinstance(request, api.GenerationInput), "texts alone are tokenized"
            digest.update(repr(list(request.token_ids.ids[:BEGINNING])).encode())
        case _:
            digest.update(request.text[:BEGINNING].encode(errors="surrogatepass"))
    return digest.digest()


def _share(stated: str, part: str) -> Share:
    model, _, weight = part.strip().rpartition(":")
    try:
        share = Share(model, float(weight))
    except ValueError:
        raise SplitNamesError(f"{stated!r}: write {_FORM}") from None
    if not model or not 0 < share.weight < math.inf:
        raise SplitNamesError(f"{stated!r}: each model needs a weight above 0")
    return share


def _drawn(share: Share, conversation: bytes) -> float:
    digest = hashlib.sha256(conversation + share.model.encode()).digest()
    part = (int.from_bytes(digest[:8]) + 0.5) / (1 << 64)
    return -share.weight / math.log(part)
