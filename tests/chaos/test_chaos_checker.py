"""The checker, shown a good history and, for each rule, one that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from chaos.checker import Choice, Excuses, Token, check, is_of_form
from chaos.history import USUAL_TIMEOUT_S, Ask, Event, History

ASK = Ask(number=3, prompt=(1, 2, 3), max_tokens=4, choices=2, timeout_s=10.0)
REFERENCE = (
    Choice(tuple(Token(id_, 0.5) for id_ in (11, 12, 13, 14)), "LENGTH"),
    Choice(tuple(Token(id_, 0.5) for id_ in (21, 22)), "END_OF_SEQUENCE"),
)
TRACE = "ab" * 16


def delta(choice: int, index: int, *tokens: int) -> Event:
    return Event("delta", 1.0, choice, index, tokens)


def status(code: str, reason: str = "", at_s: float = 2.0, **more) -> Event:
    return Event("status", at_s, code=code, reason=reason, **more)


START = Event("started", 1.0, trace_id=TRACE)
END_0 = Event("finished", 1.5, 0, finish_reason="LENGTH")
END_1 = Event("finished", 1.6, 1, finish_reason="END_OF_SEQUENCE", output_tokens=6)
OK = status("OK")
GOOD = [
    START,
    delta(0, 0, 11),
    delta(1, 0, 21, 22),
    delta(0, 1, 12, 13),
    delta(0, 3, 14),
    END_0,
    END_1,
    OK,
]


def history(events: list[Event], ask: Ask = ASK) -> History:
    return History(ask, 0.5, list(events))


NO_EXCUSE = Excuses()


def rules(*histories: History, excuses: Excuses = NO_EXCUSE, reference=REFERENCE) -> set[str]:
    references = {one.ask.number: reference for one in histories}
    return {violation.rule for violation in check(histories, references, excuses)}


def without(*events: Event) -> list[Event]:
    return [event for event in GOOD if event not in events]


def replaced(old: Event, *new: Event) -> list[Event]:
    at = GOOD.index(old)
    return [*GOOD[:at], *new, *GOOD[at + 1 :]]


def test_a_good_history_breaks_no_rule() -> None:
    assert rules(history(GOOD)) == set()


BROKEN: list[tuple[str, str, list[Event]]] = [
    ("gap", "a token is missing", replaced(GOOD[3], delta(0, 2, 13))),
    ("duplicate", "a token came twice", replaced(GOOD[3], delta(0, 1, 12), delta(0, 1, 12, 13))),
    ("duplicate", "a resume began at 0 again", replaced(GOOD[4], delta(0, 0, 11), delta(0, 3, 14))),
    ("token", "a token is wrong", replaced(GOOD[3], delta(0, 1, 12, 99))),
    ("token", "the first one is wrong", replaced(GOOD[1], delta(0, 0, 21))),
    ("length", "it ended early", without(GOOD[4])),
    ("length", "it went on", replaced(GOOD[2], delta(1, 0, 21, 22, 23))),
    ("length", "more than max_tokens", replaced(GOOD[4], delta(0, 3, 14, 15))),
    ("length", "another reason", replaced(END_0, replace(END_0, finish_reason="STOP"))),
    ("usage", "miscounted", replaced(END_1, replace(END_1, output_tokens=5))),
    ("usage", "not counted", replaced(END_1, replace(END_1, output_tokens=None))),
    ("usage", "counted twice", replaced(END_0, replace(END_0, output_tokens=6))),
    ("grammar", "started twice", [START, *GOOD]),
    ("grammar", "not started", GOOD[1:]),
    ("grammar", "a delta after the status", [*GOOD, delta(0, 4)]),
    ("grammar", "a choice goes on after its end", [*without(OK), delta(1, 2), OK]),
    ("grammar", "ended twice", [*without(OK), END_0, OK]),
    ("grammar", "a choice nobody asked for", replaced(GOOD[4], GOOD[4], delta(2, 0))),
    ("status", "it never ended", without(OK)),
    ("status", "it ended twice", [*GOOD, OK]),
    ("status", "no status of the table", replaced(OK, status("UNKNOWN", "?"))),
    ("status", "unavailable after tokens", replaced(OK, status("UNAVAILABLE", "NO_WORKERS"))),
    ("status", "aborted before tokens", [status("ABORTED", "WORKER_LOST_MID_STREAM")]),
    ("status", "internal", replaced(OK, status("INTERNAL", "INTERNAL"))),
    ("unfinished", "OK without the end of a choice", without(END_0)),
    ("promise", "gave up without need", [status("UNAVAILABLE", "WORKER_LOST")]),
    ("promise", "nobody cancelled", [status("UNAVAILABLE", "KV_TRANSFER_FAILED")]),
    ("status", "the client did not cancel", [status("CANCELLED", "CANCELLED")]),
    ("status", "the router did not die", [status("UNAVAILABLE", "UNREACHABLE")]),
    ("late", "it hung", replaced(OK, status("OK", at_s=12.6))),
    ("trace", "no trace id", replaced(START, replace(START, trace_id=""))),
    ("trace", "another trace id", replaced(OK, replace(OK, trace_id="cd" * 16))),
]


@pytest.mark.parametrize(
    ("rule", "what", "events"), BROKEN, ids=[f"{r}: {w}" for r, w, _ in BROKEN]
)
def test_a_broken_history_is_found_by_its_rule(rule: str, what: str, events: list[Event]) -> None:
    assert rule in rules(history(events))


def test_what_came_while_the_client_did_not_look_is_not_late() -> None:
    late = History(ASK, 0.5, replaced(OK, status("OK", at_s=13.5)), blind_s=1.1)
    assert rules(late) == set()
    late.blind_s = 0.9
    assert rules(late) == {"late"}


def test_two_requests_do_not_share_a_trace() -> None:
    other = history(GOOD, replace(ASK, number=4))
    assert rules(history(GOOD), other) == {"trace"}


def aborted(tokens_sent: int) -> list[Event]:
    return [*GOOD[:4], status("ABORTED", "WORKER_LOST_MID_STREAM", tokens_sent=tokens_sent)]


def test_an_excused_failure_tells_the_truth_about_what_was_sent() -> None:
    excuses = Excuses(failures=True)
    assert rules(history(aborted(5)), excuses=excuses) == set()
    assert rules(history(aborted(4)), excuses=excuses) == {"status"}
    assert rules(history(aborted(5))) == {"promise"}


def test_who_cancels_may_be_told_so_and_what_came_before_must_be_right() -> None:
    went = replace(ASK, behaviour="cancel", after_deltas=2)
    cancelled = History(went, 0.5, [*GOOD[:3], status("CANCELLED")], cancelled_s=1.0)
    assert rules(cancelled) == set()
    cancelled.events[1] = delta(0, 0, 10)
    assert rules(cancelled) == {"token"}


def test_a_router_that_died_excuses_what_it_carried() -> None:
    gone = [*GOOD[:3], status("UNAVAILABLE", "UNREACHABLE")]
    assert rules(history(gone), excuses=Excuses(router_gone=True)) == set()


def test_only_the_last_worker_that_shuts_down_may_refuse_so() -> None:
    drained = [status("UNAVAILABLE", "DRAINING")]
    assert rules(history(drained), excuses=Excuses(failures=True, drains=True)) == set()
    assert rules(history(drained), excuses=Excuses(drains=True)) == {"promise"}
    assert rules(history(drained), excuses=Excuses(failures=True)) == {"status"}


def test_only_a_poisonous_request_may_be_told_so_without_an_excuse() -> None:
    killed = [status("INTERNAL", "POISON_REQUEST")]
    assert rules(history(killed, replace(ASK, poison=True))) == set()
    assert rules(history(killed)) == {"promise"}
    lost = [status("UNAVAILABLE", "WORKER_LOST")]
    assert rules(history(lost, replace(ASK, poison=True))) == {"promise"}


def test_only_a_form_that_crashes_is_too_complex_and_has_no_answer() -> None:
    refused = [status("INVALID_ARGUMENT", "STRUCTURE_TOO_COMPLEX")]
    crash = replace(ASK, form=("lark", "start: start"), crash=True)
    assert rules(history(refused, crash), reference=()) == set()
    assert rules(history(refused)) == {"promise"}
    assert "promise" in rules(history(GOOD, crash), reference=())


@pytest.mark.parametrize(
    ("option", "form", "right", "wrong"),
    [
        ("regex", "[a-c]{2}", "ab", "abc"),
        ("json_schema", '{"type": "integer"}', " 7", '"7"'),
        ("json_schema", "{}", "[]", "["),
    ],
)
def test_an_output_is_of_its_form(option: str, form: str, right: str, wrong: str) -> None:
    assert is_of_form(option, form, right)
    assert not is_of_form(option, form, wrong)


def test_only_a_short_deadline_may_pass_without_an_excuse() -> None:
    passed = [*GOOD[:3], status("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")]
    assert rules(history(passed, replace(ASK, timeout_s=1.0))) == set()
    assert rules(history(passed, replace(ASK, timeout_s=USUAL_TIMEOUT_S))) == {"promise"}
    refused = [status("DEADLINE_EXCEEDED", "DEADLINE_UNREACHABLE")]
    assert rules(history(refused, replace(ASK, timeout_s=1.0))) == set()


@pytest.mark.parametrize(("tokens_sent", "found"), [(3, set()), (9, set()), (2, {"status"})])
def test_at_a_deadline_more_was_sent_than_was_read_and_never_less(
    tokens_sent: int, found: set[str]
) -> None:
    ended = status("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", tokens_sent=tokens_sent)
    short = replace(ASK, timeout_s=1.0)
    assert rules(history([*GOOD[:3], ended], short)) == found


@pytest.mark.parametrize("change", [lambda t: t._replace(margin=1e-5)])
def test_nothing_is_compared_behind_a_margin_below_the_noise(
    change: Callable[[Token], Token],
) -> None:
    unsure = list(REFERENCE[0].tokens)
    unsure[1] = change(unsure[1])
    reference = (Choice(tuple(unsure), "LENGTH"), REFERENCE[1])
    behind = replaced(GOOD[3], delta(0, 1, 98, 99))
    assert rules(history(behind), reference=reference) == set()
    before = replaced(GOOD[1], delta(0, 0, 98))
    assert rules(history(before), reference=reference) == {"token"}


def test_draws_and_best_tokens_have_margins_of_their_own() -> None:
    """3e-4 is certain for a draw and not for a lead in logits."""
    tokens = tuple(Token(token.id, 3e-4) for token in REFERENCE[0].tokens)
    reference = (Choice(tokens, "LENGTH"), REFERENCE[1])
    wrong = replaced(GOOD[1], delta(0, 0, 98))
    assert rules(history(wrong), reference=reference) == set()
    drawn = replace(ASK, temperature=0.8)
    assert rules(history(wrong, drawn), reference=reference) == {"token"}
