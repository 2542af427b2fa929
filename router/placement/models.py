"""The models that attached workers serve. A job runs only on workers of the name that it asks for.

Life of a name:

1. A worker announces that it loads the model.
2. Its first worker attaches.
3. Workers for both legs are attached, and jobs can run.
4. Its last worker leaves. For `REMEMBERED_S` clients are asked to wait for a worker. After that the
   name is unknown.

An adapter has a name of its own beside its model's, which chooses its content when a request comes,
and anew if that cannot run any more before the request has begun. Of several contents of one name
that is chosen which can run, and of those the one that most workers have.

Workers of one name may hold different weights, during an upgrade or by mistake. A job stays with
one revision from its prompt's first token id to its last retry. New jobs get the revision that can
run. If several can, they get the one with the most workers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from router import errors
from router.jobs import ServedModel
from router.placement import routing
from router.workers.link import Loss

if TYPE_CHECKING:
    from baton.worker.v1 import worker_pb2
    from router.settings import LocalPrefill
    from router.workers.link import WorkerLink

logger = logging.getLogger(__name__)

REMEMBERED_S: Final = 600.0
"""Time for which a model without workers is expected back, seconds."""
MOST_NAMES: Final = 1024
"""Most names whose workers left that are remembered. The oldest go."""
LOADING_S: Final = 3.5
"""Age at which an announcement of loading expires. They come every second, so three may be lost."""


class Models:
    """Names and their workers; `workers` is the dispatcher's own list of attached workers."""

    def __init__(self, workers: Sequence[WorkerLink], local: LocalPrefill) -> None:
        self._workers = workers
        self._local = local
        self._left_s: dict[str, float] = {}
        """When the last worker of a name left."""
        self._lost_s: dict[str, float] = {}
        """When a worker of a name was last lost without a word: something may start it again."""
        self._froze_s: dict[str, float] = {}
        """When a worker of a name was last lost because it stood still."""
        self._served: dict[str, ServedModel] = {}
        """Results of `_of` by name, until a worker joins, leaves or changes. Requests need one."""
        self._loading: dict[str, tuple[str, float]] = {}
        """The name that a worker loads and the time of its last announcement, by worker."""

    def attached(self) -> list[ServedModel]:
        """One for each name that any worker serves, by name."""
        names = sorted({worker.identity.model.name for worker in self._workers})
        return [self._of(name) for name in names]

    def runnable(self) -> list[ServedModel]:
        """Models that could run now. Models with workers for only one of the two legs are left
        out."""
        return [model for model in self.attached() if self._can_run(model)]

    def adapted(self) -> list[ServedModel]:
        """Adapters that could run now, by name. A model's own name comes before an adapter's."""
        own = {worker.identity.model.name for worker in self._workers}
        names = sorted({name for worker in self._workers for name in worker.adapters} - own)
        found = [self._adapted(name) for name in names]
        return [model for model in found if model is not None and self._can_run(model)]

    def find(self, name: str, now_s: float) -> ServedModel:
        """The model of that name. An empty name selects the only model that can run.

        Raises:
            RouterError: NO_WORKERS, MODEL_LOADING or MODEL_NOT_FOUND.
        """
        if self._named(name):
            return self._of(name)
        if (adapted := self._adapted(name)) is not None:
            if self.is_changing(adapted):
                raise adapter_changes(name)
            return adapted
        if loading := self._loaded_now(name, now_s):
            raise errors.model_loading(loading)
        if not self._workers or self._is_expected(name, now_s):
            raise errors.no_workers(name)
        candidates = self.runnable() or self.attached()
        if not name and len(candidates) == 1:
            return candidates[0]
        served = [*self.attached(), *self.adapted()]
        raise errors.model_not_found(name, [model.called for model in served])

    def follows(self, model: ServedModel) -> ServedModel | None:
        """What runs under an adapter's name now that the content which it meant cannot run any
        more. None: it can, or nothing else can. The model is the same, down to its revision."""
        if not model.digest or self._can_run(model):
            return None
        found = self._adapted(model.adapter)
        if found is None or (found.name, found.revision) != (model.name, model.revision):
            return None
        return found if self._can_run(found) else None

    def is_changing(self, model: ServedModel) -> bool:
        """Whether an adapter cannot run, but some of its model's workers have the name, and those
        of the model can run. So what it means may run soon."""
        named = self._named(model.name)
        has_name = any(model.adapter in worker.adapters for worker in named)
        return has_name and self.lacks_adapter(model)

    def lacks_adapter(self, model: ServedModel) -> bool:
        """Whether it cannot run for want of its adapter's content alone."""
        if not model.digest or self._can_run(model):
            return False
        return routing.can_run(self._named(model.name), self._local)

    def loading(self, worker: worker_pb2.WorkerIdentity, now_s: float) -> None:
        """Notes that a worker loads its model."""
        self._loading = {
            other: (name, said_s)
            for other, (name, said_s) in self._loading.items()
            if now_s - said_s < LOADING_S
        }
        self._loading[worker.worker_id] = worker.model.name, now_s

    def is_loading(self, name: str, now_s: float) -> bool:
        """Whether a worker loads it now. An empty name means any model, while no worker is
        attached."""
        return bool(self._loaded_now(name, now_s))

    def _loaded_now(self, name: str, now_s: float) -> str:
        """The name of the model that a worker loads now; "" for none."""
        is_any = not name and not self._workers
        for loaded, said_s in self._loading.values():
            if now_s - said_s < LOADING_S and (is_any or name == loaded):
                return loaded
        return ""

    def joined(self, worker: WorkerLink) -> None:
        """A worker was attached."""
        model = worker.identity.model
        self._served.clear()
        self._loading.pop(worker.identity.worker_id, None)
        for name in (model.name, *worker.adapters):
            self._left_s.pop(name, None)
        named = self._named(model.name)
        revisions = sorted({other.identity.model.revision for other in named})
        if len({other.fingerprint for other in named}) > 1 or len(revisions) > 1:
            fields = {"model": model.name, "joined": worker.worker_id, "revisions": revisions}
            logger.warning(
                "workers of one model name differ in weights or settings, and exchange nothing",
                extra=fields,
            )

    def changed(self) -> None:
        """The role of a worker is another one."""
        self._served.clear()

    def left(self, worker: WorkerLink, now_s: float, loss: Loss) -> None:
        """A worker is gone."""
        name = worker.identity.model.name
        self._served.clear()
        if not worker.left_in_order(loss):
            _remember(self._lost_s, name, now_s)
        if loss is Loss.FROZEN:
            _remember(self._froze_s, name, now_s)
        if not self._named(name):
            _remember(self._left_s, name, now_s)
        for adapter in worker.adapters:
            if not any(adapter in other.adapters for other in self._workers):
                _remember(self._left_s, adapter, now_s)

    def adapters_changed(self, worker: WorkerLink) -> None:
        """A worker has other adapters. A name that nobody has any more was unloaded."""
        self._served.clear()
        for name in worker.adapters:
            self._left_s.pop(name, None)

    def is_expected_back(self, name: str, now_s: float, within_s: float) -> bool:
        """Whether a worker of a name is likely to come: one was lost without a word not longer ago
        than `within_s`, or loads now. Workers that left in order are not started again."""
        lost_s = self._lost_s.get(name)
        is_lost = lost_s is not None and now_s - lost_s <= within_s
        return is_lost or self.is_loading(name, now_s)

    def may_wake(self, name: str, now_s: float, within_s: float) -> bool:
        """Whether a worker of a name stood still not longer ago than `within_s`."""
        froze_s = self._froze_s.get(name)
        return froze_s is not None and now_s - froze_s <= within_s

    def _is_expected(self, name: str, now_s: float) -> bool:
        left_s = self._left_s.get(name)
        return left_s is not None and now_s - left_s < REMEMBERED_S

    def _named(self, name: str) -> list[WorkerLink]:
        return [worker for worker in self._workers if worker.identity.model.name == name]

    def _adapted(self, name: str) -> ServedModel | None:
        """The model with the adapter of a name; None: no worker has it."""
        if name not in self._served:
            having = [worker for worker in self._workers if name in worker.adapters]
            if not having:
                return None
            contents = Counter((worker.model[0], worker.adapters[name]) for worker in having)
            models = {
                content: replace(self._of(content[0]), adapter=name, digest=content[1])
                for content in sorted(contents)
            }
            best = max(models, key=lambda one: (self._can_run(models[one]), contents[one]))
            self._served[name] = models[best]
        return self._served[name]

    def _of(self, name: str) -> ServedModel:
        """The model for new jobs of that name."""
        if name not in self._served:
            self._served[name] = self._choose(name)
        return self._served[name]

    def _choose(self, name: str) -> ServedModel:
        """The revision that can run, as the first of its workers describes it. It takes an
        extension if workers that all take it can run a job."""
        models = [ServedModel.of(worker.identity.model) for worker in self._named(name)]
        workers = Counter(model.revision for model in models)
        best = max(models, key=lambda model: (self._can_run(model), workers[model.revision]))
        names = frozenset().union(*(model.extensions for model in models))
        return replace(best, extensions=frozenset(filter(partial(self._takes, best), names)))

    def _takes(self, model: ServedModel, extension: str) -> bool:
        workers = [worker for worker in self._workers if worker.serves(model)]
        having = [one for one in workers if extension in one.identity.model.extensions]
        return routing.can_run(having, self._local)

    def _can_run(self, model: ServedModel) -> bool:
        workers = [worker for worker in self._workers if worker.serves(model)]
        return routing.can_run(workers, self._local)


def adapter_changes(name: str) -> errors.RouterError:
    """The error while workers load or replace an adapter, and cannot run together what a request
    has of it."""
    why = "is an adapter that was replaced, or that not all workers have yet or can read now"
    return errors.model_loading(name, 1.0, why)


def _remember(times_s: dict[str, float], name: str, now_s: float) -> None:
    """Notes the time of a name, behind all others."""
    times_s.pop(name, None)
    times_s[name] = now_s
    if len(times_s) > MOST_NAMES:
        del times_s[next(iter(times_s))]
