"""Judges histories: is every token right, is every end an end, and did it come in time?

The rules, each with a name that a violation carries:

    grammar    `started` first and once; nothing of a choice after its end; nothing after the status
    gap        a delta begins behind the tokens that came before it
    duplicate  a delta begins before the end of the tokens that came before it
    token      a token differs from the fault-free run
    length     a finished choice is shorter or longer than in the fault-free run, or ends otherwise
    usage      the tokens counted for the client are not those it got
    status     no terminal event, or more than one, or one that the table does not have
    unfinished OK, and a choice is not finished
    promise    a status that this run had no excuse for
    form       a choice that has ended by itself is not of the form that was asked for
    late       the end came more than `GRACE_S` after the deadline, but for what the client itself
               did not look
    trace      no trace id, several, or that of another request

Greedy and seeded output must equal the fault-free run up to the first token whose deciding margin
there is below the numerical noise: from there on both answers are right, and nothing is compared.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from jsonschema import Draft202012Validator

from chaos.history import USUAL_TIMEOUT_S, Ask, Event, History

GRACE_S: Final = 2.0
GREEDY_NOISE: Final = 1e-3
"""Lead of the best logit; recomputed float32 logits differ by about 3e-5."""
DRAWN_NOISE: Final = 2e-4
"""Distance of the number drawn from the edge of its token's interval, in probability."""

BEFORE_FIRST_TOKEN: Final[Mapping[str, frozenset[str]]] = {
    "UNAVAILABLE": frozenset({"NO_WORKERS", "WORKER_LOST", "KV_TRANSFER_FAILED", "MODEL_LOADING"}),
    "RESOURCE_EXHAUSTED": frozenset({"QUEUE_FULL", "QUEUE_TIMEOUT", "DEADLINE_UNREACHABLE"}),
    "DEADLINE_EXCEEDED": frozenset({"DEADLINE_EXCEEDED", "DEADLINE_UNREACHABLE"}),
    "INTERNAL": frozenset({"POISON_REQUEST"}),
    "INVALID_ARGUMENT": frozenset({"STRUCTURE_TOO_COMPLEX"}),
}
AFTER_FIRST_TOKEN: Final[Mapping[str, frozenset[str]]] = {
    "ABORTED": frozenset({"WORKER_LOST_MID_STREAM", "READER_TOO_SLOW", "POISON_REQUEST"}),
    "DEADLINE_EXCEEDED": frozenset({"DEADLINE_EXCEEDED"}),
}
OF_DEADLINES: Final = frozenset({"DEADLINE_EXCEEDED", "DEADLINE_UNREACHABLE"})
"""gRPC lets a caller whose deadline is met read nothing more of what was sent to it. Where the
router's refusal comes at that moment, the code is the caller's own and the reason the router's."""
UNREACHABLE: Final = "UNREACHABLE"
"""The router itself was gone: the connection broke and no status was sent."""


class Token(NamedTuple):
    """One token of the fault-free run."""

    id: int
    margin: float


class Choice(NamedTuple):
    """One choice of the fault-free run."""

    tokens: tuple[Token, ...]
    finish_reason: str


Reference = Sequence[Choice]


class Excuses(NamedTuple):
    """What the faults of a run allow."""

    failures: bool = False
    """Requests may fail with a status of the table: nobody was left who could run them."""
    router_gone: bool = False
    """It died, or stood still for longer than a connection lasts."""
    drains: bool = False
    """A worker was told to shut down: it may be the last that is left."""


class Violation(NamedTuple):
    """A rule that a history breaks."""

    rule: str
    request: int
    text: str

    def __str__(self) -> str:
        return f"[{self.rule}] request {self.request}: {self.text}"


def check(
    histories: Sequence[History], references: Mapping[int, Reference], excuses: Excuses
) -> list[Violation]:
    """Every violation in the histories of a run; `references` by the request's number."""
    found: list[Violation] = []
    for history in histories:
        reference = references[history.ask.number]
        for rule, text in _judge(history, reference, excuses):
            found.append(Violation(rule, history.ask.number, text))
    ids = Counter(history.trace_id for history in histories if history.trace_id)
    shared = (history for history in histories if ids[history.trace_id] > 1)
    return [*found, *(Violation("trace", h.ask.number, "shares its trace id") for h in shared)]


def comparable(ask: Ask, choice: Choice) -> int:
    """How many leading tokens have a margin above the noise; all of them where none has not."""
    noise = DRAWN_NOISE if ask.temperature > 0 else GREEDY_NOISE
    for index, token in enumerate(choice.tokens):
        if token.margin < noise:
            return index
    return len(choice.tokens)


def is_of_form(option: str, form: str, text: str) -> bool:
    """Whether a whole output is what a regular expression or a schema asks for."""
    if option == "regex":
        return re.fullmatch(form, text) is not None
    try:
        return Draft202012Validator(json.loads(form)).is_valid(json.loads(text))
    except json.JSONDecodeError:
        return False


Found = Iterator[tuple[str, str]]


def _judge(history: History, reference: Reference, excuses: Excuses) -> Found:
    yield from _grammar(history)
    yield from _trace(history)
    for number, choice in enumerate(reference):
        yield from _continuity(history, number)
        yield from _tokens(history, number, choice)
        yield from _length(history, number, choice)
    yield from _usage(history)
    yield from _status(history, excuses)
    yield from _deadline(history)


def _grammar(history: History) -> Found:
    started, over, finished = False, False, set()
    for event in history.events:
        if over:
            yield "grammar", f"{event.kind} after the status"
        if event.kind == "started":
            if started:
                yield "grammar", "started twice"
            started = True
        elif event.kind == "status":
            over = True
        elif not started:
            yield "grammar", f"{event.kind} before started"
        elif event.choice >= history.ask.choices:
            yield "grammar", f"choice {event.choice} was not asked for"
        elif event.choice in finished:
            yield "grammar", f"{event.kind} of choice {event.choice} after its end"
        if event.kind == "finished":
            finished.add(event.choice)


def _trace(history: History) -> Found:
    ids = {event.trace_id for event in history.events if event.trace_id}
    if len(ids) > 1:
        yield "trace", "several trace ids"
    if not ids and any(event.kind == "started" for event in history.events):
        yield "trace", "no trace id"


def _continuity(history: History, choice: int) -> Found:
    count = 0
    for event in history.events:
        if event.kind != "delta" or event.choice != choice:
            continue
        if event.index > count:
            yield "gap", f"choice {choice} goes on at {event.index}, not at {count}"
        elif event.index < count:
            yield "duplicate", f"choice {choice} goes on at {event.index}, not at {count}"
        count = event.index + len(event.tokens)


def _tokens(history: History, number: int, choice: Choice) -> Found:
    want = choice.tokens[: comparable(history.ask, choice)]
    for index, (token, expected) in enumerate(zip(history.tokens(number), want, strict=False)):
        if token != expected.id:
            yield (
                "token",
                f"choice {number} has {token} at {index}, the fault-free run {expected.id} "
                f"(margin {expected.margin:.2g})",
            )
            return


def _length(history: History, number: int, choice: Choice) -> Found:
    """Only where every token of the fault-free run was certain."""
    got = len(history.tokens(number))
    if got > history.ask.max_tokens:
        yield "length", f"choice {number} has {got} tokens, more than max_tokens"
    if comparable(history.ask, choice) < len(choice.tokens):
        return
    if got > len(choice.tokens):
        yield "length", f"choice {number} has {got} tokens, not {len(choice.tokens)}"
    for end in _finished(history, number):
        if got != len(choice.tokens):
            yield "length", f"choice {number} ended at {got} tokens, not {len(choice.tokens)}"
        elif end.finish_reason != choice.finish_reason:
            yield "length", f"choice {number} ended by {end.finish_reason}"


def _finished(history: History, choice: int) -> list[Event]:
    return [e for e in history.events if e.kind == "finished" and e.choice == choice]


def _usage(history: History) -> Found:
    told = [e.output_tokens for e in history.events if e.output_tokens is not None]
    got = sum(len(event.tokens) for event in history.events)
    if len(told) > 1:
        yield "usage", "told more than once"
    if told and told[0] != got:
        yield "usage", f"{told[0]} output tokens are counted, and {got} came"
    if not told and history.ended_ok:
        yield "usage", "not told"


def _status(history: History, excuses: Excuses) -> Found:
    statuses = [event for event in history.events if event.kind == "status"]
    if len(statuses) != 1:
        yield "status", f"{len(statuses)} terminal events"
        return
    status = statuses[0]
    if status.code == "OK":
        if history.ask.crash:
            yield "promise", "OK, and its form cannot be read"
        missing = [n for n in range(history.ask.choices) if not _finished(history, n)]
        if missing:
            yield "unfinished", f"OK, but choices {missing} are not finished"
        return
    if history.cancelled_s is not None and status.code == "CANCELLED":
        return
    if excuses.router_gone and status.reason == UNREACHABLE:
        return
    drains = excuses.drains and (status.code, status.reason) == ("UNAVAILABLE", "DRAINING")
    if not drains and not _is_in_table(history, status):
        yield "status", f"{status.code} {status.reason} is no status of this moment"
    elif not _is_excused(history, status, excuses):
        yield "promise", f"{status.code} {status.reason} although the run had no excuse for it"


def _is_in_table(history: History, status: Event) -> bool:
    got = sum(len(event.tokens) for event in history.events)
    table = AFTER_FIRST_TOKEN if got else BEFORE_FIRST_TOKEN
    if status.reason not in table.get(status.code, ()):
        return False
    sent = got if status.tokens_sent is None else status.tokens_sent
    return sent == got or (sent > got and status.reason in OF_DEADLINES)


def _is_excused(history: History, status: Event, excuses: Excuses) -> bool:
    if status.reason == "STRUCTURE_TOO_COMPLEX":
        return history.ask.crash
    if status.reason == "READER_TOO_SLOW":
        return history.ask.behaviour == "stall"
    if history.ask.poison and status.reason == "POISON_REQUEST":
        return True
    if status.reason in OF_DEADLINES and history.ask.timeout_s < USUAL_TIMEOUT_S:
        return True
    return excuses.failures


def _deadline(history: History) -> Found:
    deadline_s = history.sent_s + history.ask.timeout_s + history.blind_s
    ends: Iterable[float] = (event.at_s for event in history.events if event.kind == "status")
    for at_s in ends:
        if at_s > deadline_s + GRACE_S:
            yield "late", f"ended {at_s - deadline_s:.2f} s after its deadline"
