"""A run, drawn from a seed: which processes, which requests, which faults. No clock, no process.

The same seed and number always make the same run, whatever ran before. Runs share a cluster in
blocks of `RUNS_PER_CLUSTER`: the topology belongs to the block, all else to the run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from chaos.history import USUAL_TIMEOUT_S, Ask, Behaviour

RUNS_PER_CLUSTER: Final = 20
VOCAB: Final = 384
FIRST_ID: Final = 5
"""Below are special tokens."""
EXPERTS: Final = "experts"
MODELS: Final = ("", "", "windows", "", "hybrid", "", EXPERTS, "windows alone", "", "hybrid")
"""The model of each block of runs: some layers have windows, or all, or most have states, or all
have experts, which workers hold together."""
IN_GROUP: Final = 2
"""Workers of an expert group, the first of their role."""
TIGHT_PAGES: Final = 150
"""Every request fits by itself, and hardly three of the larger ones at once."""
POISON_TOKENS: Final = 173
"""Length of a prompt that kills, and of no other."""
SPAN_S: Final = 1.5
"""Requests begin, and faults strike, within this time; but for some requests with a form."""
SHORT_TIMEOUT_S: Final = 1.0
"""A deadline that a fault, or a busy machine, lets pass."""

FaultKind = Literal[
    "kill",
    "freeze",
    "failpoint",
    "stall_thread",
    "hold_gil",
    "cut_control",
    "cut_data",
    "kill_router",
    "freeze_router",
    "kill_client",
    "freeze_client",
    "poison",
    "short_grants",
    "cut_path",
    "kill_writer",
    "kill_rank",
    "freeze_rank",
    "kill_store",
    "freeze_store",
    "below",
    "kill_aside",
    "restart",
    "change_role",
]
OF_RANKS: Final[dict[FaultKind, FaultKind]] = {"kill": "kill_rank", "freeze": "freeze_rank"}
"""What befalls a worker of several ranks befalls one of them, mostly: not rank 0."""
RANKS: Final = ((2, 1), (1, 2), (2, 2))
"""Of prefill and decode workers, where there are several. Each is a process that imports torch, so
there are fewer workers then."""
WEIGHTS: Final[dict[FaultKind, int]] = {
    "kill": 30,
    "freeze": 10,
    "failpoint": 30,
    "stall_thread": 6,
    "hold_gil": 4,
    "cut_control": 6,
    "cut_data": 6,
    "kill_router": 4,
    "freeze_router": 4,
    "kill_client": 4,
    "freeze_client": 4,
    "poison": 4,
    "short_grants": 8,
    "cut_path": 6,
    "kill_writer": 8,
    "kill_store": 6,
    "freeze_store": 3,
    "below": 8,
    "kill_aside": 4,
}
OF_HAND_OFFS: Final = ("short_grants", "cut_path", "kill_writer")
"""Between a prefill and a decode worker."""
PLANNED: Final[tuple[FaultKind, ...]] = ("restart", "change_role")
"""What an operator does: no fault, and no request may fail of it while another one is there."""
OF_STORES: Final = ("kill_store", "freeze_store")
"""Of the processes that read and write a worker's stores. No request needs them."""
FORMS: Final = {
    "regex": "[a-f]{{4,30}}-[0-9]{{2,5}} {0}",
    "json_schema": '{{"type": "object", "additionalProperties": false, "required": ["name", "age"],'
    '"properties": {{"name": {{"type": "string", "maxLength": 12}}, "age": {{"maximum": {0},'
    '"minimum": 0, "type": "integer"}}}}}}',
}
"""By the client's option. With another number it is a form that nobody has checked before."""
CRASHING_RULES: Final = (4_000, 12_000)
"""Length of a chain of rules that ends whoever reads it."""
ENDINGS: Final = ("kill", "kill", "stop")
PREFILL_POINTS: Final = (
    "prefill.submitted",
    "prefill.granted",
    "prefill.chunk",
    "prefill.first_token",
    "worker.wrote~first_token",
    "transfer.before_push",
    "transfer.before_last_push",
    "transfer.pushed",
    "transfer.last_pushed",
    "transfer.done",
    "prefill.sent",
    "transfer.before_quiesced",
)
DECODE_POINTS: Final = (
    "decode.submitted",
    "decode.before_grant",
    "decode.after_grant",
    "worker.wrote~granted",
    "transfer.chunk_landed",
    "decode.ready",
    "decode.delivered",
    "decode.tokens",
    "decode.ended",
    "decode.quarantined",
    "worker.wrote~tokens",
)
ROUTER_POINTS: Final = (
    "router.received~granted",
    "router.received~first_token",
    "router.received~delivered",
    "router.received~tokens",
    "router.received~finished",
    "router.received~fetch",
)
TIER_POINTS: Final = ("tiers.save", "tiers.load")
"""Of every worker, if there are tiers."""
STORE_POINTS: Final = ("store.lookup", "store.load", "store.loaded", "store.store")
"""Of the processes of a worker's stores."""
RANK_POINTS: Final = {"prefill": ("rank.step", "rank.push"), "decode": ("rank.step", "rank.asked")}
"""Of a worker's other ranks, by its role; and `rank.copy`, if there are tiers."""
BELOW_PROMPTS: Final = 24
BELOW_TOKENS: Final = 580
BELOW_ENDINGS: Final = ("kill", "kill", "raise", "sleep:0.5", "sleep:4.5")
"""Nobody would wake what stops itself below a worker."""
FETCH_POINTS: Final = (
    "fetch.wanted",
    "fetch.asked",
    "worker.wrote~fetch",
    "fetch.landed",
    "fetch.received",
    "fetch.held",
    "transfer.before_last_push",
    "transfer.last_pushed",
    "transfer.done",
    "fetch.sent",
    "worker.wrote~fetch_refused",
)
"""Of every worker, if they fetch pages from each other: at who lacks them, then at who has."""
BOTH_POINTS: Final = ("decode.submitted", "decode.tokens", "decode.ended", "worker.wrote~tokens")
MAX_NTH: Final = {"decode.tokens": 120, "worker.wrote~tokens": 40, "prefill.chunk": 12}


@dataclass(frozen=True)
class Topology:
    """Workers by role."""

    prefill: int
    decode: int
    both: int = 0
    num_pages: int = 700
    """Of each pool; few make sequences wait and be preempted."""
    tcp: bool = False
    """Pages go over TCP, though shared memory would do."""
    tiers: bool = False
    """Pages that a pool evicts go to host memory and to a disk."""
    fetching: str = ""
    """The router says that this worker holds all prompts, or `any`."""
    model: str = ""
    """One of `MODELS`; the empty one keeps K and V of all tokens."""
    flexible: bool = False
    """Roles of workers may change."""
    ranks: tuple[int, int] = (1, 1)
    """Of each prefill worker and of each decode worker. A worker of both roles has the larger."""
    stages: bool = False
    """Ranks divide layers, and not heads."""
    groups: tuple[str, ...] = ()
    """Roles whose first workers are an expert group: they end together."""

    def ranks_of(self, name: str) -> int:
        """Of a worker."""
        prefill, decode = self.ranks
        return {"prefill": prefill, "decode": decode}.get(name.partition("-")[0], max(self.ranks))

    @property
    def workers(self) -> tuple[str, ...]:
        """Names, as a cluster gives them."""
        counts = {"prefill": self.prefill, "decode": self.decode, "both": self.both}
        return tuple(f"{role}-{i}" for role, count in counts.items() for i in range(count))

    @property
    def prefills(self) -> list[str]:
        """Who sends pages."""
        return [name for name in self.workers if name.startswith("prefill")]

    @property
    def decodes(self) -> list[str]:
        """Who gets them."""
        return [name for name in self.workers if name.startswith("decode")]

    def group_of(self, name: str) -> list[str]:
        """Workers that end with this one, itself included."""
        role, _, number = name.partition("-")
        if role not in self.groups or int(number) >= IN_GROUP:
            return [name]
        return [f"{role}-{rank}" for rank in range(IN_GROUP)]

    def peers(self, name: str) -> int:
        """Processes that do what this one does, itself included. A group counts as one."""
        role = name.partition("-")[0]
        counts = {"prefill": self.prefill, "decode": self.decode, "both": self.both, "router": 1}
        return counts[role] - (IN_GROUP - 1) * (role in self.groups)


TOPOLOGIES: Final = (
    Topology(1, 1),
    Topology(2, 1),
    Topology(1, 2),
    Topology(2, 2),
    Topology(3, 2),
    Topology(2, 3),
    Topology(3, 3),
    Topology(0, 0, 2),
    Topology(1, 1, 1),
)
GROUPED: Final = (
    Topology(0, 0, 2, groups=("both",)),
    Topology(3, 1, groups=("prefill",), ranks=(1, 2)),
    Topology(1, 3, groups=("decode",)),
    Topology(2, 2, groups=("prefill", "decode")),
    Topology(1, 3, groups=("decode",), ranks=(2, 1), stages=True),
)
"""Those of models with experts."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: FaultKind
    at_s: float
    """After the begin of the run; failpoints are armed before it."""
    target: str
    """Name of a process."""
    failpoint: str = ""
    """Specification to arm at the target, if it is one."""
    lasts_s: float = 0.0
    """How long a frozen process stands."""
    restart_after_s: float = 0.0
    """A process that died starts again this much later."""

    @property
    def is_of_spares(self) -> bool:
        """No request needs what it strikes, or another one takes its place."""
        spares = (*OF_STORES, "kill_aside")
        return self.kind in spares or self.failpoint.partition("=")[0] in STORE_POINTS

    def __str__(self) -> str:
        what = self.failpoint or self.kind
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{what} at {self.target} after {self.at_s:.2f} s{lasts}"


@dataclass(frozen=True)
class RunPlan:
    """Everything that is decided beforehand."""

    seed: int
    number: int
    topology: Topology
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]

    @property
    def others_can_take_over(self) -> bool:
        """Whether each request must come to its end all the same: at most one worker is struck,
        and another one does what it does."""
        struck = {
            fault.target
            for fault in self.faults
            if fault.target != "client" and not fault.is_of_spares
        }
        return not struck or (
            len(struck) == 1 and all(self.topology.peers(name) > 1 for name in struck)
        )

    def __str__(self) -> str:
        shape = self.topology
        faults = "; ".join(map(str, self.faults)) or "no fault"
        workers = f"{shape.prefill}P {shape.decode}D {shape.both}B x {shape.num_pages} pages"
        kind = "stages" if shape.stages else "ranks"
        workers += f" with {shape.ranks} {kind}" * (max(shape.ranks) > 1)
        workers += " over TCP" * shape.tcp + " over tiers" * shape.tiers
        workers += f" with {' and '.join(shape.groups)} in a group" * bool(shape.groups)
        workers += " with flexible roles" * shape.flexible
        workers += " fetching" * bool(shape.fetching) + f" of {shape.model}" * bool(shape.model)
        return f"run {self.number} of seed {self.seed}: {workers}, {len(self.asks)} asks, {faults}"


def topology_of(seed: int, number: int) -> Topology:
    """The cluster that a run shares with its block."""
    block = number // RUNS_PER_CLUSTER
    rng = random.Random(seed)
    first, tight, over_tcp = rng.randrange(len(TOPOLOGIES)), rng.randrange(2), rng.randrange(3)
    topology = TOPOLOGIES[(first + block) % len(TOPOLOGIES)]
    if MODELS[block % len(MODELS)] == EXPERTS:
        topology = GROUPED[(first + block // len(MODELS)) % len(GROUPED)]
    topology = replace(topology, tcp=block % 3 == over_tcp, fetching="any" * (block % 4 < 3))
    topology = replace(topology, model=MODELS[block % len(MODELS)], flexible=block % 2 == 0)
    if block % 4 == 3 and not topology.groups:
        fewer = {"prefill": min(2, topology.prefill), "decode": min(2, topology.decode)}
        topology = replace(topology, ranks=RANKS[(first + block // 4) % len(RANKS)], **fewer)
        if block // 4 % 2 != tight:
            staged = replace(topology, stages=True, model=topology.model.replace("hybrid", ""))
            return staged if block // 8 % 2 == tight else topology
        return replace(topology, num_pages=TIGHT_PAGES, tiers=True)
    if block % 2 != tight:
        return topology
    tiers = block // 2 % 2 == 0 and not topology.stages  # Stages have none.
    return replace(topology, num_pages=TIGHT_PAGES, tiers=tiers)


def plan_run(seed: int, number: int, topology: Topology | None = None) -> RunPlan:
    """The run, by default on the cluster of its block."""
    rng = random.Random(f"{seed}/{number}")
    topology = topology or topology_of(seed, number)
    asks = _asks(rng)
    count = rng.choice((0, 1, 1, 1, 1, 2, 2))
    kinds = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    faults = [fault for kind in kinds for fault in _faults(rng, kind, topology)]
    faults = [_at_a_rank(rng, fault, topology) for fault in faults]
    faults += _planned(random.Random(f"{seed}/{number}/planned"), topology)
    if "poison" in kinds:
        asks = (*asks, _poison(rng, len(asks)))
    forms = random.Random(f"{seed}/{number}/forms")
    if "kill_aside" in kinds or forms.random() < 0.5:
        asks = (*asks, *_formed(forms, len(asks)))
    return RunPlan(seed, number, topology, asks, tuple(faults))


def plan_fetch_moment(seed: int, number: int, target: str, failpoint: str) -> RunPlan:
    """The same, with prompts that go on where others ended, and all are said to lie on one decode
    worker."""
    plan = plan_moment(seed, number, target, failpoint)
    rng = random.Random(f"{seed}/{number}/base")
    base = tuple(rng.randrange(FIRST_ID, VOCAB) for _ in range(700))
    in_order = sorted(plan.asks, key=lambda ask: ask.start_s)
    asks = tuple(
        replace(ask, prompt=base[: 64 + 32 * turn] + ask.prompt[:20], start_s=0.25 * turn)
        for turn, ask in enumerate(in_order)
    )
    topology = replace(plan.topology, fetching="decode-0")
    return replace(plan, asks=asks, topology=topology)


def plan_moment(seed: int, number: int, target: str, failpoint: str) -> RunPlan:
    """The requests of a run, close together and all read to their ends, on two prefill and two
    decode workers, one of which has an accident at a named moment."""
    plan = plan_run(seed, number)
    asks = tuple(
        replace(ask, start_s=ask.start_s / 4, behaviour="read", timeout_s=USUAL_TIMEOUT_S)
        for ask in plan.asks
        if not ask.poison and ask.form[0] == ""
    )
    fault = Fault("failpoint", 0, target, failpoint, lasts_s=4.0, restart_after_s=0.2)
    return replace(plan, topology=Topology(2, 2), asks=asks, faults=(fault,))


def plan_rolling(seed: int, number: int) -> RunPlan:
    """The requests of a run, while each worker in turn is started anew or has another role for a
    moment. Each time there is another one like it."""
    plan = plan_moment(seed, number, "", "")
    topology = Topology(2, 2, flexible=True)
    asks = tuple(replace(ask, start_s=8 * ask.start_s) for ask in plan.asks)
    faults = tuple(
        Fault(kind, 2.5 * turn, name, lasts_s=0.5, restart_after_s=0.2)
        for turn, (kind, name) in enumerate(
            (kind, name) for name in topology.workers for kind in PLANNED
        )
    )
    return replace(plan, topology=topology, asks=asks, faults=faults)


def of_model(plan: RunPlan, model: str) -> RunPlan:
    """The same run of another model."""
    return replace(plan, topology=replace(plan.topology, model=model))


def plan_of_rank(seed: int, number: int, fault: Fault) -> RunPlan:
    """The requests of a run. A worker of two ranks suffers `fault`; there is another like it."""
    plan = plan_moment(seed, number, fault.target, "")
    prefill = fault.target.startswith("prefill")
    topology = Topology(2, 1, ranks=(2, 1)) if prefill else Topology(1, 2, ranks=(1, 2))
    return replace(plan, topology=topology, faults=(fault,))


def plan_below(seed: int, number: int, fault: Fault) -> RunPlan:
    """The same over host memory and a disk. Long prompts come all once, and then all again: pool
    and host memory together do not hold them."""
    plan = plan_of_rank(seed, number, fault)
    rng = random.Random(f"{seed}/{number}/below")
    asks = []
    for turn in range(BELOW_PROMPTS):
        prompt = tuple(rng.randrange(FIRST_ID, VOCAB) for _ in range(BELOW_TOKENS))
        for again in (False, True):
            start_s = 0.1 * turn + 3.0 * again
            asks.append(Ask(len(asks), prompt, max_tokens=8, timeout_s=90.0, start_s=start_s))
    both = fault.target.startswith("both")
    topology = Topology(0, 0, 2, ranks=(2, 2)) if both else plan.topology
    topology = replace(topology, num_pages=TIGHT_PAGES, tiers=True)
    return replace(plan, topology=topology, asks=tuple(asks))


def _at_a_rank(rng: random.Random, fault: Fault, topology: Topology) -> Fault:
    """The same at another rank of its worker, mostly."""
    kind = OF_RANKS.get(fault.kind)
    if kind is None or topology.ranks_of(fault.target) == 1 or rng.random() < 0.3:
        return fault
    return replace(fault, kind=kind)


def _asks(rng: random.Random) -> tuple[Ask, ...]:
    shared = tuple(rng.randrange(FIRST_ID, VOCAB) for _ in range(200))
    return tuple(_ask(rng, number, shared) for number in range(rng.randint(6, 18)))


def _ask(rng: random.Random, number: int, shared: tuple[int, ...]) -> Ask:
    length = rng.choice((1, 15, 16, 17, 40, 90, 160, 300, 500))
    own = tuple(rng.randrange(FIRST_ID, VOCAB) for _ in range(length))
    held = shared[: rng.choice((0, 0, 0, 48, 160, 200))]
    behaviours: tuple[Behaviour, ...] = ("read",) * 8 + ("cancel", "stall")
    return Ask(
        number=number,
        prompt=held + own if len(held + own) != POISON_TOKENS else (*held, *own, FIRST_ID),
        max_tokens=rng.choice((1, 2, 8, 24, 60, 120)),
        choices=rng.choice((1, 1, 1, 1, 2, 3)),
        temperature=rng.choice((0.0, 0.0, 0.7, 1.0)),
        seed=rng.getrandbits(63),
        frequency_penalty=rng.choice((0.0, 0.0, 0.0, 0.8)),
        ignore_eos=rng.random() < 0.7,
        timeout_s=rng.choice((USUAL_TIMEOUT_S,) * 11 + (SHORT_TIMEOUT_S,)),
        start_s=rng.uniform(0, SPAN_S),
        behaviour=rng.choice(behaviours),
        after_deltas=rng.randint(0, 12),
    )


def _poison(rng: random.Random, number: int) -> Ask:
    prompt = tuple(rng.randrange(FIRST_ID, VOCAB) for _ in range(POISON_TOKENS))
    return Ask(number, prompt, max_tokens=30, start_s=rng.uniform(0, SPAN_S), poison=True)


def _formed(rng: random.Random, first: int) -> Iterator[Ask]:
    """Some with a form each, the third and later ones after `kill_aside`; in half of the runs one
    whose form crashes."""
    count = rng.randint(3, 5)
    for turn in range(count):
        option, text = rng.choice(tuple(FORMS.items()))
        yield replace(
            _ask(rng, first + turn, ()),
            max_tokens=rng.choice((24, 60, 120)),
            start_s=turn * SPAN_S / 2,
            ignore_eos=False,
            form=(option, text.format(rng.randrange(1 << 30))),
        )
    if rng.random() < 0.5:
        rules = rng.randint(*CRASHING_RULES)
        chain = "\n".join(f"r{i}: r{i + 1}" for i in range(rules))
        lark = f'start: r0\n{chain}\nr{rules}: "x"'
        yield replace(
            _ask(rng, first + count, ()), ignore_eos=False, form=("lark", lark), crash=True
        )


def _poisoned(topology: Topology) -> list[Fault]:
    """Whoever computes the poisonous prompt dies of it, each worker once."""
    return [
        Fault("poison", 0, name, f"{point}=kill~{POISON_TOKENS}@1", restart_after_s=0.2)
        for name in topology.workers
        for point in ("prefill.submitted", "decode.submitted")
        if not name.startswith("decode") and name.startswith("both") == point.startswith("decode")
    ]


def _faults(rng: random.Random, kind: FaultKind, topology: Topology) -> list[Fault]:
    """What is drawn under one name; a death where there is no hand-off or store that it needs."""
    if kind == "poison":
        return _poisoned(topology)
    if kind == "below":
        return [_below(rng, topology)]
    if kind in OF_STORES and not topology.tiers:
        return [_fault(rng, "kill", topology)]
    if kind not in OF_HAND_OFFS:
        return [_fault(rng, kind, topology)]
    if not (topology.prefills and topology.decodes):
        return [_fault(rng, "kill", topology)]
    prefill, decode = rng.choice(topology.prefills), rng.choice(topology.decodes)
    match kind:
        case "short_grants":
            which = rng.choice(("", "@1", "@2", "@3"))
            waits = [(decode, "decode.grant_timeout"), (prefill, "prefill.grant_wait")]
            waits += [(decode, "fetch.timeout"), (prefill, "fetch.timeout")] * bool(
                topology.fetching
            )
            target, point = rng.choice(waits)
            return [Fault(kind, 0, target, f"{point}=raise{which}")]
        case "cut_path":
            ends = [prefill, decode]
            rng.shuffle(ends)
            return [Fault(kind, 0, ends[0], f"transfer.path=raise~{ends[1]}")]
        case _:  # What it writes meanwhile is taken by the decode worker after its death.
            at_s, lasts_s = rng.uniform(0.05, SPAN_S), rng.uniform(0.5, 1.5)
            return [
                Fault("freeze", at_s, decode, lasts_s=lasts_s),
                Fault("kill_writer", at_s + lasts_s - 0.1, prefill, restart_after_s=0.2),
            ]


def _planned(rng: random.Random, topology: Topology) -> Iterator[Fault]:
    """In a third of the runs with flexible roles."""
    if topology.flexible and rng.random() < 0.35:
        names = [name for name in topology.workers if topology.peers(name) > 1]
        names = [name for name in names if not name.startswith("both")] or [topology.workers[0]]
        kind, at_s = rng.choice(PLANNED), rng.uniform(0.05, SPAN_S)
        lasts_s = rng.choice((0.3, 1.5))
        yield Fault(kind, at_s, rng.choice(names), lasts_s=lasts_s, restart_after_s=0.2)


def _fault(rng: random.Random, kind: FaultKind, topology: Topology) -> Fault:
    target = rng.choice(topology.workers)
    at_s = rng.uniform(0.05, SPAN_S)
    restart_after_s = rng.choice((0.0, 0.2, 1.0))
    match kind:
        case "kill_router" | "kill_aside":
            return Fault(kind, at_s, "router", restart_after_s=restart_after_s)
        case "freeze_router":
            return Fault(kind, at_s, "router", lasts_s=rng.choice((0.3, 1.5, 4.0)))
        case "kill_client":
            return Fault(kind, at_s, "client")
        case "freeze_client":
            return Fault(kind, at_s, "client", lasts_s=rng.choice((0.3, 1.5, 4.0)))
        case "kill" | "kill_store":
            return Fault(kind, at_s, target, restart_after_s=restart_after_s)
        case "freeze_store":
            return Fault(kind, at_s, target, lasts_s=rng.choice((0.3, 1.5, 4.0)))
        case "freeze":
            lasts_s = rng.choice((0.3, 0.3, 1.5, 1.5, 4.5, 4.5, 7.0))
            return Fault(kind, at_s, target, lasts_s=lasts_s)
        case "failpoint":
            somebody = rng.choice((*topology.workers, "router"))
            return _at_failpoint(rng, topology, somebody, restart_after_s)
        case "stall_thread":
            point = rng.choice(("engine.turn", "engine.step", "transfer.before_push"))
            spec = f"{point}=sleep:{rng.choice((0.5, 4.5))}@{rng.randint(1, 6)}"
            return Fault(kind, 0, target, spec)
        case "hold_gil":
            return Fault(kind, 0, target, f"engine.step=gil:{rng.choice((1, 4))}@1")
        case "cut_control":
            return Fault(kind, 0, target, f"worker.received=raise@{rng.randint(1, 8)}")
        case "cut_data":
            sender = rng.choice([w for w in topology.workers if not w.startswith("decode")])
            point = rng.choice(("transfer.before_push", "transfer.before_last_push"))
            return Fault(kind, 0, sender, f"{point}=raise@{rng.randint(1, 4)}")
        case _:
            raise ValueError(kind)


def below_points(topology: Topology, target: str) -> list[str]:
    """Failpoints of the processes that a worker has started: ranks and stores."""
    points = list(STORE_POINTS) * topology.tiers
    if topology.ranks_of(target) > 1:
        points += RANK_POINTS.get(target.partition("-")[0], ("rank.step",))
        points += ["rank.copy"] * topology.tiers
    return points


def _below(rng: random.Random, topology: Topology) -> Fault:
    """A failpoint of such a process; a death of a worker where none has any."""
    points = {name: below_points(topology, name) for name in topology.workers}
    targets = [name for name in topology.workers if points[name]]
    if not targets:
        return _fault(rng, "kill", topology)
    target = rng.choice(targets)
    spec = below(rng.choice(points[target]), rng.choice(BELOW_ENDINGS), rng.randint(1, 8))
    return Fault("below", 0, target, spec, restart_after_s=rng.choice((0.2, 1.0)))


def below(point: str, ending: str, nth: int) -> str:
    """The specification. Four copies measure the rates at a worker's start."""
    key = "~1" * point.startswith("rank.")
    return f"{point}={ending}{key}@{nth + 4 * (point == 'rank.copy')}"


def _at_failpoint(
    rng: random.Random, topology: Topology, target: str, restart_after_s: float
) -> Fault:
    points = {
        "prefill": PREFILL_POINTS,
        "decode": DECODE_POINTS,
        "both": BOTH_POINTS,
        "router": ROUTER_POINTS,
    }
    role = target.partition("-")[0]
    more = TIER_POINTS * topology.tiers + FETCH_POINTS * bool(topology.fetching)
    point = rng.choice(points[role] + more * (role != "router"))
    name, tilde, key = point.partition("~")
    nth = rng.randint(1, MAX_NTH.get(point, 4))
    ending = rng.choice(ENDINGS)
    lasts_s = rng.choice((0.5, 4.5)) if ending == "stop" else 0.0
    spec = f"{name}={ending}{tilde}{key}@{nth}"
    return Fault("failpoint", 0, target, spec, lasts_s, restart_after_s)
