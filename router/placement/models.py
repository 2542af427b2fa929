"""The models that attached workers serve. A name is a pool: jobs that ask for it run there only.

Life of a name: a worker says that it is loading it -> its first worker attaches -> it can be run,
once workers for every part of a job are there -> its last worker leaves: for `REMEMBERED_S` it is a
model without workers, which clients are told to wait for, and after that one that nobody serves.

Workers of one name may hold different weights while a fleet is upgraded, or by mistake. A job is
bound to one revision from its prompt's first token id to its last retry; new jobs get the revision
that can be run, and of several the one with the most workers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from router import errors
from router.jobs import ServedModel
from router.placement import routing

if TYPE_CHECKING:
    from baton.worker.v1 import worker_pb2
    from router.settings import LocalPrefill
    from router.workers.link import WorkerLink

logger = logging.getLogger(__name__)

REMEMBERED_S: Final = 600.0
"""A model whose workers all left is expected back for this long."""
LOADING_S: Final = 3.5
"""Workers that load say so every second: three times may go missing."""


class Models:
    """Names and who serves them; `workers` is the dispatcher's own list of attached workers."""

    def __init__(self, workers: Sequence[WorkerLink], local: LocalPrefill) -> None:
        self._workers = workers
        self._local = local
        self._left_s: dict[str, float] = {}
        """When the last worker of a name left."""
        self._lost_s: dict[str, float] = {}
        """When a worker of a name was last lost without a word: something may start it again."""
        self._served: dict[str, ServedModel] = {}
        """What `_of` said of names, until a worker joins or leaves: every request asks."""
        self._loading: dict[str, tuple[str, float]] = {}
        """By worker: the name that it loads, and when it last said so."""

    def attached(self) -> list[ServedModel]:
        """One for each name that any worker serves, by name."""
        names = sorted({worker.identity.model.name for worker in self._workers})
        return [self._of(name) for name in names]

    def runnable(self) -> list[ServedModel]:
        """Those that could be run now: not those that half of a pair is attached for."""
        return [model for model in self.attached() if self._can_run(model)]

    def find(self, name: str, now_s: float) -> ServedModel:
        """The model of that name; an empty one selects the only one that can be run.

        Raises:
            RouterError: NO_WORKERS, MODEL_LOADING or MODEL_NOT_FOUND.
        """
        if self._named(name):
            return self._of(name)
        if self.is_loading(name, now_s):
            raise errors.model_loading(name)
        if not self._workers or self._is_expected(name, now_s):
            raise errors.no_workers(name)
        candidates = self.runnable() or self.attached()
        if not name and len(candidates) == 1:
            return candidates[0]
        raise errors.model_not_found(name, [model.name for model in self.attached()])

    def loading(self, worker: worker_pb2.WorkerIdentity, now_s: float) -> None:
        """A worker says that it loads its model."""
        self._loading = {
            other: (name, said_s)
            for other, (name, said_s) in self._loading.items()
            if now_s - said_s < LOADING_S
        }
        self._loading[worker.worker_id] = worker.model.name, now_s

    def is_loading(self, name: str, now_s: float) -> bool:
        """Whether a worker loads it now; an empty name is any, where nobody is attached yet."""
        is_any = not name and not self._workers
        return any(
            now_s - said_s < LOADING_S and (is_any or name == loaded)
            for loaded, said_s in self._loading.values()
        )

    def joined(self, worker: WorkerLink) -> None:
        """A worker was attached."""
        model = worker.identity.model
        self._served.clear()
        self._loading.pop(worker.identity.worker_id, None)
        self._left_s.pop(model.name, None)
        revisions = {other.identity.model.revision for other in self._named(model.name)}
        if len(revisions) > 1:
            fields = {"model": model.name, "revisions": sorted(revisions)}
            logger.warning("workers of one model name hold different weights", extra=fields)

    def left(self, worker: WorkerLink, now_s: float, *, in_order: bool) -> None:
        """A worker is gone; `in_order`, if it had said that it would."""
        name = worker.identity.model.name
        self._served.clear()
        if not in_order:
            self._lost_s[name] = now_s
        if not self._named(name):
            self._left_s[name] = now_s

    def is_expected_back(self, name: str, now_s: float, within_s: float) -> bool:
        """Whether a worker of a name is likely to come: one was lost without a word not longer ago
        than `within_s`, or loads now. Workers that left in order are not started again."""
        lost_s = self._lost_s.get(name)
        is_lost = lost_s is not None and now_s - lost_s <= within_s
        return is_lost or self.is_loading(name, now_s)

    def _is_expected(self, name: str, now_s: float) -> bool:
        left_s = self._left_s.get(name)
        return left_s is not None and now_s - left_s < REMEMBERED_S

    def _named(self, name: str) -> list[WorkerLink]:
        return [worker for worker in self._workers if worker.identity.model.name == name]

    def _of(self, name: str) -> ServedModel:
        """What new jobs of that name get."""
        if name not in self._served:
            self._served[name] = self._choose(name)
        return self._served[name]

    def _choose(self, name: str) -> ServedModel:
        """The model that can be run; of workers alike in weights, the first one's word."""
        models = [ServedModel.of(worker.identity.model) for worker in self._named(name)]
        workers = Counter(model.revision for model in models)
        return max(models, key=lambda model: (self._can_run(model), workers[model.revision]))

    def _can_run(self, model: ServedModel) -> bool:
        workers = [worker for worker in self._workers if routing.holds(worker, model)]
        return routing.can_run(workers, self._local)
