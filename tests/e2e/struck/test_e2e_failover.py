"""Workers die under running streams, and the clients notice nothing but a pause."""

from __future__ import annotations

import signal
import time

from streams import Reading, bring_back, busy, prompt_of, read

from baton.client.generation import FinishReason
from struck import DECODES

NOISE = 1e-3
"""Log probabilities of float32 logits, computed in another order, differ by less."""
MAX_TOKENS = 150
KILL_AFTER = 40
REPLAYED = [
    {"temperature": 0.0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.9, "top_p": 0.95, "seed": 77, "choices": 3},
    {
        "temperature": 0.8,
        "seed": 5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "min_tokens": 120,
    },
    {  # It dies inside a string, and the grammar must go on there.
        "temperature": 1.3,
        "seed": 8,
        "ignore_eos": False,
        "json_schema": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "string", "minLength": 2000},
            },
            "required": ["a", "b"],
        },
    },
]


def check_same(reading: Reading, unbroken: Reading, options) -> None:
    """Nothing lost, nothing repeated, and what a fault-free run says, up to the first token whose
    choice hung by less than the noise."""
    assert reading.error is None, reading.error
    for choice in range(options.get("choices", 1)):
        got, want = reading.tokens(choice), unbroken.tokens(choice)
        assert len(got) == len(want)
        if got != want:
            first = next(i for i in range(len(want)) if got[i] != want[i])
            assert options.get("logprobs"), f"choice {choice} differs at {first}"
            scores = [score for delta in unbroken.deltas for score in delta.logprobs][first]
            margin = scores.top[0][1] - scores.top[1][1]
            assert margin < NOISE, f"differs at {first}, margin {margin}"
    usage = reading.generation.usage
    assert usage.prompt_tokens == unbroken.generation.usage.prompt_tokens
    assert usage.output_tokens == MAX_TOKENS * options.get("choices", 1)
    ends = {choice.finish_reason for choice in reading.generation.choices}
    assert ends == {FinishReason.LENGTH}
    assert [c.text for c in reading.generation.choices if not options.get("logprobs")] == [
        c.text for c in unbroken.generation.choices if not options.get("logprobs")
    ]


def other_than(decode: str) -> str:
    (other,) = {*DECODES} - {decode}
    return other


def test_streams_survive_the_death_of_their_decode_worker(cluster):
    """Greedy with log probabilities, three choices, penalties: on both decode workers at once."""
    with cluster.client() as client:
        prompts = [prompt_of(90 + i, seed=i) for i in range(len(REPLAYED))]
        unbroken = []
        for prompt, options in zip(prompts, REPLAYED, strict=True):
            unbroken.append(read(client, prompt, **options))
            unbroken[-1].end()
        cases = [*zip(prompts, REPLAYED, unbroken, strict=True)] * 2
        cluster.slow_down(*DECODES)
        readings = [read(client, prompt, **options) for prompt, options, _ in cases]
        for reading in readings:
            reading.until(KILL_AFTER)
        victim = busy(cluster, "decode")
        cluster.kill(victim)
        cluster.disarm()
        for reading, (_, options, want) in zip(readings, cases, strict=True):
            reading.end()
            check_same(reading, want, options)
    assert cluster.metric("baton_failovers_total") >= 1
    bring_back(cluster, victim)


def test_streams_survive_the_death_of_a_prefill_worker(cluster):
    """Some prompts wait, some are computed, some are decoded when it dies."""
    prompts = [prompt_of(1200, seed=50 + i) for i in range(6)]
    options = {"temperature": 0.0, "max_tokens": 40, "timeout_s": 60}
    with cluster.client() as client:
        want = [
            client.generate(token_ids=prompt, ignore_eos=True, **options).token_ids
            for prompt in prompts
        ]
        prompts = [[*prompt[:-1], 7] for prompt in prompts]  # not in any prefix cache to the end
        fresh = [read(client, prompt, temperature=0.0, max_tokens=40) for prompt in prompts]
        time.sleep(0.4)
        cluster.kill("prefill-0")
        for reading in fresh:
            reading.end()
            assert reading.error is None, reading.error
            assert len(reading.tokens()) == 40
        again = [
            client.generate(token_ids=prompt, ignore_eos=True, **options).token_ids
            for prompt in prompts
        ]
        assert [tuple(reading.tokens()) for reading in fresh] == again
        assert again != want
    bring_back(cluster, "prefill-0")


def test_a_frozen_decode_worker_loses_its_streams_and_is_taken_back(cluster):
    """It answers no ping; what it says when it wakes is nobody's business any more."""
    with cluster.client() as client:
        options = REPLAYED[2]
        want = read(client, prompt_of(92, seed=2), **options)
        want.end()
        cluster.slow_down(*DECODES)
        readings = [read(client, prompt_of(92, seed=2), **options) for _ in range(2)]
        for reading in readings:
            reading.until(KILL_AFTER)
        victim = busy(cluster, "decode")
        cluster.kill(victim, signal.SIGSTOP)
        cluster.arm(other_than(victim), "")
        for reading in readings:
            reading.end()
            check_same(reading, want, options)
        assert max(reading.longest_gap_s for reading in readings) < 3.0 + 3.0
        cluster.kill(victim, signal.SIGCONT)
        cluster.wait_attached(victim)
        cluster.check_baseline()
        result = client.generate(token_ids=prompt_of(50), max_tokens=8, ignore_eos=True)
        assert len(result.token_ids) == 8
