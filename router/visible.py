"""The names of models and adapters that a caller may use.

To a tenant that is bound to names (`router.doors.auth`), all others are as if they were not served:
no list has them, and who asks for one gets the error for an unknown name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from router import errors

if TYPE_CHECKING:
    from router.call import Call, Caller
    from router.jobs import Dispatcher, ServedModel


class Visible:
    """What is served, as one caller sees it.

    Args:
        dispatcher: has everything.
        caller: a caller, or a call of its.
    """

    def __init__(self, dispatcher: Dispatcher, caller: Caller | Call) -> None:
        self._dispatcher = dispatcher
        self._names = caller.models

    def may_use(self, name: str) -> bool:
        """Whether the caller may use what has this name."""
        return self._names is None or name in self._names

    def models(self) -> Sequence[ServedModel]:
        """Models and adapters served now; see `router.jobs.Dispatcher.models`."""
        return [model for model in self._dispatcher.models() if self.may_use(model.called)]

    def model(self, name: str) -> ServedModel:
        """The model or adapter of that name; see `router.jobs.Dispatcher.model`. An empty name
        selects the only model that the caller may use, or its only adapter if it may use no model.

        Raises:
            RouterError: MODEL_NOT_FOUND, NO_WORKERS or MODEL_LOADING.
        """
        if self._names is None:
            return self._dispatcher.model(name)
        name = name or self._only(self._names)
        served = [model.called for model in self.models()]
        if name not in self._names:
            raise errors.model_not_found(name, served)
        try:
            return self._dispatcher.model(name)
        except errors.RouterError as error:
            if error.reason != "MODEL_NOT_FOUND":
                raise
        raise errors.model_not_found(name, served)  # The other one names everything served.

    def _only(self, names: frozenset[str]) -> str:
        """What an empty name means; empty: several things. While nothing is served, any of the
        names has the reason."""
        models = self.models()
        found = [model.called for model in models if not model.adapter]
        found = found or [model.called for model in models] or [min(names)]
        return found[0] if len(found) == 1 else ""
