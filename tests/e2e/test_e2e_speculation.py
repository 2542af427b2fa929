"""Drafts and beams between real processes. Streams through a hand-off, and through kills of either
side, equal those of workers without drafts; searches equal those of transformers, by every door."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from beams_kit import Searches
from cluster import running
from references import references
from streams import at_once, prompt_of
from tiny_models import write_tiny_model
from typer.testing import CliRunner

from console.cli import app
from console.commands.ask import turns
from engine.beams.params import BeamParams, EarlyStopping

TOKENS = 60
LENGTHS = (17, 40, 64, 100)
FOUND = 14
"""Tokens of a search."""
DRAWN = {"temperature": 1.0, "seed": 5, "top_k": 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    options = {"local_prefill": "never", "prefix_cache": False, "speculation": "suffix"}
    logs = tmp_path_factory.mktemp("logs")
    with running(model, logs, prefill=2, decode=2, failpoints="live", **options) as cluster:
        yield cluster


def repeated(length: int) -> list[int]:
    """A prompt with much to be found again."""
    return (prompt_of(12) * (length // 12 + 1))[:length]


def requests(client, **options) -> list[list[int]]:
    """Answers to some prompts, asked at once."""
    options |= {"max_tokens": TOKENS, "ignore_eos": True}
    ask = lambda length: list(client.generate(token_ids=repeated(length), **options).token_ids)  # noqa: E731
    return at_once(ask, LENGTHS)


def test_a_hand_off_with_drafts_gives_what_transformers_gives(cluster, model) -> None:
    answer = references(model)
    wanted = [answer(repeated(n), TOKENS, past_end=True).tokens for n in LENGTHS]
    with cluster.client() as client:
        assert requests(client, temperature=0.0) == wanted
        again = {"token_ids": repeated(100), "max_tokens": TOKENS, "ignore_eos": True}
        drafting = client.generate(**again, temperature=0.0).usage
        silent = client.generate(**again, temperature=0.0, speculation=False)
    assert list(silent.token_ids) == wanted[-1]
    assert (silent.usage.accepted_draft_tokens, silent.usage.rejected_draft_tokens) == (0, 0)
    assert drafting.accepted_draft_tokens + drafting.rejected_draft_tokens > 0
    drafted = "baton_speculation_drafted_tokens_total"
    assert sum(cluster.metric(drafted, f"decode-{i}", position="0") for i in range(2)) > 0
    cluster.check_baseline()


# -- beams ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def searches(model):
    return Searches(model)


def search(client, prompt, width=4, **options):
    return client.generate(
        token_ids=prompt, max_tokens=FOUND, beams=width, choices=width, **options
    )


def check(found, want):
    assert [list(one.token_ids) for one in found.choices] == [tokens for tokens, _ in want]
    scores = [score for _, score in want]
    assert [one.score for one in found.choices] == pytest.approx(scores, abs=1e-3)


def total(cluster, name: str, role: str, **labels: str) -> float:
    """A figure of both workers of a role."""
    return sum(cluster.metric(name, f"{role}-{i}", **labels) for i in range(2))


def test_a_hand_off_finds_what_transformers_finds(cluster, searches):
    """At once, beside streams. One transfer serves all beams."""
    prompts = [prompt_of(n) for n in (17, 40, 64)]
    found, sent = {}, total(cluster, "baton_kv_transfers_total", "prefill", outcome="sent")
    with cluster.client() as client:

        def ask(number: int) -> None:
            if number < len(prompts):
                found[number] = search(client, prompts[number])
            else:
                client.generate(token_ids=prompt_of(50), max_tokens=60, choices=2)

        at_once(ask, range(len(prompts) + 1))
        options = {"length_penalty": 2.0, "early_stopping": "at_once", "stop_token_ids": [9, 30]}
        tuned = search(client, prompts[1], **options)
        short = client.generate(token_ids=prompts[0], max_tokens=1, beams=4, choices=2)
    for n, prompt in enumerate(prompts):
        check(found[n], searches.find(prompt, BeamParams(4), FOUND, (0,)))
    params = BeamParams(4, 2.0, EarlyStopping.AT_ONCE)
    check(tuned, searches.find(prompts[1], params, FOUND, (0, 9, 30)))
    assert len({one.token_ids for one in short.choices}) == 2
    assert total(cluster, "baton_kv_transfers_total", "prefill", outcome="sent") == sent + 6
    assert total(cluster, "baton_beam_searches_total", "decode") == 5
    assert total(cluster, "baton_beam_forks_total", "decode") > 0
    cluster.check_baseline()


def post(cluster, path, **body):
    request = urllib.request.Request(
        f"http://{cluster.plan.http_address}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]


def test_vllms_fields_over_http(cluster, searches):
    prompt, text = prompt_of(40), {"prompt": prompt_of(40), "max_tokens": FOUND}
    wanted = [tokens for tokens, _ in searches.find(prompt, BeamParams(4), FOUND, (0,))]
    asked = {**text, "use_beam_search": True, "return_token_ids": True}
    for fields, count in (({"n": 4}, 4), ({"best_of": 4, "n": 2}, 2), ({"best_of": 4}, 1)):
        answer = post(cluster, "/v1/completions", **asked, **fields)
        assert [one["token_ids"] for one in answer["choices"]] == wanted[:count]
    penalised = post(cluster, "/v1/completions", **asked, n=4, length_penalty=0.0)
    want = searches.find(prompt, BeamParams(4, 0.0), FOUND, (0,))
    assert [one["token_ids"] for one in penalised["choices"]] == [tokens for tokens, _ in want]
    for said, meant in ((True, EarlyStopping.AT_ONCE), ("never", EarlyStopping.NEVER_BETTER)):
        early = post(cluster, "/v1/completions", **asked, n=4, early_stopping=said)
        want = searches.find(prompt, BeamParams(4, 1.0, meant), FOUND, (0,))
        assert [one["token_ids"] for one in early["choices"]] == [tokens for tokens, _ in want]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    answer = post(cluster, "/v1/chat/completions", **chat, use_beam_search=True, n=2)
    assert len(answer["choices"]) == 2
    drawn = post(cluster, "/v1/completions", **text, best_of=3, seed=1, logprobs=0)
    every = post(cluster, "/v1/completions", **text, n=3, seed=1, logprobs=0)
    means = [sum(one["logprobs"]["token_logprobs"]) for one in every["choices"]]
    assert drawn["choices"][0]["text"] == every["choices"][means.index(max(means))]["text"]
    assert drawn["usage"]["completion_tokens"] == 3 * FOUND
    for fields, name in (
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"use_beam_search": True, "n": 99}, "n"),
        ({"use_beam_search": True, "length_penalty": 9}, "length_penalty"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    ):
        assert post(cluster, "/v1/completions", **text, **fields)["param"] == name
    cluster.check_baseline()


def test_the_command_prints_the_best(cluster):
    arguments = ["generate", "Hello", "--router", cluster.door, "--max-tokens", "6"]
    with cluster.client() as client:
        wanted = client.generate(messages=turns("Hello"), max_tokens=6, beams=3, choices=1)
    answer = CliRunner().invoke(app, [*arguments, "--beams", "3", "--json"])
    assert json.loads(answer.stdout)["text"] == wanted.text
    assert CliRunner().invoke(app, [*arguments, "--beams", "99"]).exit_code != 0


@pytest.mark.parametrize(
    ("worker", "moment"),
    [
        ("decode-0", "engine.turn=kill@12"),
        pytest.param("decode-0", "decode.ended=kill@1", marks=pytest.mark.slow),
        pytest.param("prefill-0", "prefill.sent=kill@1", marks=pytest.mark.slow),
        pytest.param("decode-1", "decode.after_grant=kill@1", marks=pytest.mark.slow),
    ],
)
def test_a_search_is_started_again_whole(cluster, searches, worker, moment):
    """A worker dies in the middle of it, and the client sees one answer."""
    prompt = prompt_of(33)
    want = searches.find(prompt, BeamParams(4), FOUND, (0,))
    with cluster.client(retries=True) as client:
        cluster.strike(worker, moment, lambda _: check(search(client, prompt), want))
    cluster.check_baseline()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "moment"),
    [
        ("prefill-0", "prefill.chunk=kill@1"),
        ("decode-0", "decode.tokens=kill@9"),
        ("decode-0", "decode.tokens=kill@60"),
        ("decode-1", "decode.after_grant=kill@2"),
    ],
)
def test_streams_go_on_equally_after_a_kill(cluster, worker: str, moment: str) -> None:
    with cluster.client(retries=True) as client:
        wanted = requests(client, **DRAWN, speculation=False)

        def ask(_turn: int) -> None:
            assert requests(client, **DRAWN) == wanted

        cluster.strike(worker, moment, ask)
    cluster.check_baseline()
