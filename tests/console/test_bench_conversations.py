"""Conversations of `baton bench`: what is planned, and what is really sent."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from bench_server import KnownServer
from typer.testing import CliRunner

from console.cli import app
from console.loadgen.errors import WrongUseError
from console.loadgen.outcome import Outcome
from console.loadgen.report.tables import turn_table
from console.loadgen.report.turns import turn_figures
from console.loadgen.workload import Conversations, prompt_ids, shared_prefix_share


def test_lengths_are_log_normal() -> None:
    plan = Conversations(4000, 1, system_tokens=10, output_tokens=1).plan(0, seed=1)
    lengths = np.array([request.prompt_tokens - 10 for request in plan.requests])
    assert np.median(lengths) == pytest.approx(37, rel=0.15)
    assert np.percentile(lengths, 90) == pytest.approx(4900, rel=0.25)


def test_a_conversation_fits_the_context() -> None:
    workload = Conversations(200, 8, output_tokens=50, system_tokens=100, context_tokens=1000)
    tokens = [0] * 200
    for request in workload.plan(0, seed=1).requests:
        assert request.turn
        assert request.prompt_tokens >= 1
        tokens[request.turn.conversation] += request.prompt_tokens + 50
    assert max(tokens) <= 1000
    with pytest.raises(WrongUseError, match="need 508 tokens"):
        Conversations(1, 8, output_tokens=50, system_tokens=100, context_tokens=500)


def test_all_begin_alike_and_go_on_differently() -> None:
    plan = Conversations(3, 2, system_tokens=64, output_tokens=4).plan(2.0, seed=5)
    prompts = [prompt_ids(request, 5, 1000) for request in plan.requests]
    firsts = prompts[::2]
    assert all((one[:64] == firsts[0][:64]).all() for one in firsts)
    assert len({tuple(one[64:80]) for one in prompts}) == 6
    begins = [request.due_s for request in plan.requests[::2]]
    assert begins == sorted(begins)
    assert plan.share(0, 2) + plan.share(1, 2) != plan.requests  # whole conversations
    assert [one.turn.conversation for one in plan.share(1, 2) if one.turn] == [1, 1]


def test_the_shared_share_is_that_of_an_ideal_cache() -> None:
    workload = Conversations(2, 2, system_tokens=100, output_tokens=10, p90_tokens=37)
    plan = workload.plan(0, seed=1)
    user = [one.prompt_tokens - (one.turn.system_tokens if one.turn else 0)
            for one in plan.requests]  # fmt: skip
    prompts = [100 + user[0], 110 + user[0] + user[1], 100 + user[2], 110 + user[2] + user[3]]
    shared = [0, 110 + user[0], 100, 110 + user[2]]
    assert shared_prefix_share(plan) == pytest.approx(sum(shared) / sum(prompts))


def test_the_next_prompt_goes_on_from_the_answers_own_tokens() -> None:
    arguments = ["--conversations", "3", "--turns", "3", "--system-tokens", "20", "--json"]
    arguments += ["--output-tokens", "4", "--user-p90", "50", "--think", "0.01", "--warm-ups", "0"]
    with KnownServer() as server:
        url = f"grpc://{server.address}"
        done = CliRunner().invoke(
            app, ["bench", "--url", url, "--max-lag-ms", "10000", "--senders", "2", *arguments]
        )
    assert done.exit_code == 0, done.output
    prompts = sorted(server.prompts, key=len)
    answer = (10, 11, 12, 13)  # of this server
    goes_on = 0
    for prompt in prompts:
        for earlier in prompts:
            goes_on += prompt[: len(earlier) + 4] == earlier + answer and len(prompt) > len(earlier)
    assert goes_on == 3 * (1 + 2)  # each second turn one, each third two
    found = json.loads(done.stdout)
    assert [turn["turn"] for turn in found["turns"][0]] == [1, 2, 3]
    assert [turn["requests"] for turn in found["turns"][0]] == [3, 3, 3]
    assert found["ttft_ms_from_turn_2"][0]["count"] == 3 * 2
    assert found["workload"]["conversations"] == 3


def outcome(turn, ttft_s, trace_id, cached=0, peer=0, status="OK"):
    arrivals, loaded = np.array([1 + ttft_s]), {"peer": peer} if peer else {}
    return Outcome(0, 1.0, 1.0, 100, arrivals, 2.0, 1, status, trace_id, cached, loaded, turn)


def test_the_table_says_where_prompts_came_from() -> None:
    outcomes = [
        outcome(0, 0.2, "a"), outcome(1, 0.1, "b", 80), outcome(1, 0.3, "c", 60, 40),
        outcome(1, 9.0, "d", status="TIMEOUT"),
    ]  # fmt: skip
    first, second = turn_figures(outcomes, {"b": True, "c": False})
    assert (first.requests, first.cached_share, first.sources, first.on_decode) == (1, 0, {}, None)
    assert second.requests == 2
    assert second.ttft_ms.p50 == pytest.approx(200)
    assert second.cached_share == pytest.approx(0.7)
    assert second.sources == {"pool": 0.5, "peer": 0.2}
    assert second.on_decode == 0.5
    words = turn_table((first, second))
    assert words.head[-3:] == ("peer", "pool", "on decode")
    assert words.rows[1][-4:] == ("70%", "20%", "50%", "50%")
    assert words.rows[0][-1] == "-"
    assert not math.isnan(second.prompt_tokens)
