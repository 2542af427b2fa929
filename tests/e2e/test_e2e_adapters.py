"""Adapters between real processes: prompts on one worker, answers on another over NIXL, both in
one, through kills of either side, over gRPC and HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import typer
from adapters_kit import answers, write_adapter
from cluster import make_cluster
from fetching_policy import FETCHING
from references import references
from streams import prompt_of
from tiny_models import write_tiny_model
from waiting import wait_until

from baton.errors import NotFoundError
from console.adapters.command import adapters
from console.operator_calls import OperatorCallError
from telemetry.names import Metric

TOKENS = 16
LENGTHS = (1, 17, 100)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("e2e") / "tiny")


@pytest.fixture(scope="module")
def folders(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(model, folder / name, i) for i, name in enumerate(("law", "poems"))}


def stated(folders) -> str:
    return ",".join(f"{name}={folder}" for name, folder in folders.items())


def wanted(model, folders) -> dict:
    """What each name answers with."""
    return {"tiny": references(model)} | {
        name: answers(model, folder) for name, folder in folders.items()
    }


def check(client, want, *lengths: int) -> None:
    """All names at once answer as they should."""

    def ask(name: str, length: int) -> list[int]:
        result = client.generate(
            token_ids=prompt_of(length), model=name, max_tokens=TOKENS, temperature=0.0,
            ignore_eos=True,
        )  # fmt: skip
        assert result.model == name
        return list(result.token_ids)

    asked = [(name, length) for length in lengths for name in want]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: ask(*one), asked))
    for (name, length), tokens in zip(asked, found, strict=True):
        assert tokens == want[name](prompt_of(length), TOKENS, past_end=True).tokens


def got(cluster, path: str, body: dict | None = None) -> dict:
    url = f"http://{cluster.plan.http_address}{path}"
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize("workers", [(1, 1, 0), (0, 0, 1)], ids=["apart", "both"])
def test_answers_and_lists(workers, model, folders, tmp_path) -> None:
    want = wanted(model, folders)
    counts = dict(zip(("prefill", "decode", "both"), workers, strict=True))
    cluster = make_cluster(
        model, tmp_path, local_prefill="never", adapters=stated(folders), **counts
    )
    try:
        cluster.start_all()
        with cluster.client() as client:
            check(client, want, *LENGTHS)
            with pytest.raises(NotFoundError, match="is not served"):
                client.generate("x", model="unknown", max_tokens=1)
            listed = {one.name: one.parent for one in client.models()}
        assert listed == {"tiny": "", "law": "tiny", "poems": "tiny"}
        if "decode-0" in cluster.workers:
            transfers = cluster.metric("baton_kv_transfers_total", "decode-0")
            assert transfers >= len(LENGTHS) * len(want)
        pages = {one["id"]: one.get("parent") for one in got(cluster, "/v1/models")["data"]}
        assert pages == {"tiny": None, "law": "tiny", "poems": "tiny"}
        body = {"model": "law", "prompt": prompt_of(17), "max_tokens": 2, "temperature": 0}
        assert got(cluster, "/v1/completions", body)["model"] == "law"
        counted = cluster.metric("baton_adapter_requests_total", adapter="law", outcome="ok")
        assert counted == len(LENGTHS) + 1
        for worker in cluster.workers:
            slots = {state: cluster.metric("baton_adapter_slots", worker, state=state)
                     for state in ("used", "idle", "empty")}  # fmt: skip
            assert slots == {"used": 0, "idle": 2, "empty": 6}, worker
            assert cluster.metric("baton_adapter_loads_total", worker) == 2
        cluster.check_baseline()
    finally:
        cluster.stop()


@pytest.mark.slow
def test_streams_go_on_equally_after_kills(model, folders, tmp_path) -> None:
    want = wanted(model, folders)
    own = {"prefill": 2, "decode": 2, "local_prefill": "never", "failpoints": "live"}
    cluster = make_cluster(model, tmp_path, adapters=stated(folders), **own)
    try:
        cluster.start_all()
        with cluster.client(retries=True) as client:
            for worker, moment in (
                ("prefill-0", "prefill.chunk=kill@1"),
                ("decode-0", "decode.tokens=kill@9"),
                ("decode-1", "decode.after_grant=kill@2"),
            ):
                cluster.arm(worker, moment)
                for turn in range(8):
                    check(client, want, 40 + turn, 80 + turn)
                    if cluster.processes[worker].poll() is not None:
                        break
                assert cluster.wait_gone(worker) < 0, "it was not killed"
                cluster.start(worker)
                cluster.wait_ready()
                cluster.wait_attached(worker)
        cluster.check_baseline()
    finally:
        cluster.stop()


TOKEN = "secret"


def command(cluster, path: str, body: dict, token: str = TOKEN, router: int = 0) -> tuple[int, str]:
    url = f"http://{cluster.admin_addresses[cluster.routers[router]]}{path}"
    asked = urllib.request.Request(
        url, json.dumps(body).encode(), {"authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_loaded_and_unloaded_while_they_run(model, folders, tmp_path, monkeypatch, capsys) -> None:
    """Also by a worker that is started again, and in place of another content."""
    folder = folders["law"].parent
    cluster = make_cluster(
        model, tmp_path, local_prefill="never", adapters_dir=str(folder), operator_token=TOKEN
    )
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    try:
        cluster.start_all()
        with cluster.client(retries=True) as client:
            with pytest.raises(NotFoundError):
                client.generate("x", model="new", max_tokens=1)
            assert command(cluster, load, {"lora_name": "new"}, "wrong")[0] == 403
            refused = command(cluster, load, {"lora_name": "new", "lora_path": "../x"})
            assert refused[0] == 400
            assert "lies outside of adapters_dir" in refused[1]
            assert command(cluster, load, {"lora_name": "new"})[0] == 400
            done = command(cluster, load, {"lora_name": "new", "lora_path": "law"})
            assert done == (200, "Success: LoRA adapter 'new' added successfully.")
            check(client, {"new": answers(model, folders["law"])}, 17, 60)
            cluster.kill("decode-0")
            cluster.start("decode-0")
            cluster.wait_ready()
            cluster.wait_attached("decode-0")
            wait_until(lambda: "new" in [one.name for one in client.models()], 30)
            check(client, {"new": answers(model, folders["law"])}, 17)
            other = {"lora_name": "new", "lora_path": "poems"}
            assert "taken by another adapter" in command(cluster, load, other)[1]
            assert command(cluster, load, other | {"load_inplace": True})[0] == 200
            check(client, {"new": answers(model, folders["poems"])}, 17)
            monkeypatch.setenv("BATON_OPERATOR_TOKEN", TOKEN)
            admin = cluster.plan.admin_address
            adapters("list", admin=admin)
            assert capsys.readouterr().out.startswith("new  tiny  ")
            adapters("load", "more", "law", admin=admin)
            assert "'more' added" in capsys.readouterr().out
            adapters("unload", "new", admin=admin)
            with pytest.raises(OperatorCallError, match="cannot be found"):
                adapters("unload", "new", admin=admin)
            with pytest.raises(typer.BadParameter):
                adapters("load", "new", admin=admin)
            assert command(cluster, unload, {"lora_name": "new"})[0] == 404
            with pytest.raises(NotFoundError):
                client.generate("x", model="new", max_tokens=1)
        cluster.check_baseline()
    finally:
        cluster.stop()


def talk(client, want, names: list[str], seeds: range) -> None:
    """Conversations that only their names tell apart take turns; every answer is its name's."""

    def one(name: str, seed: int) -> None:
        prompt = prompt_of(100, seed=seed)
        for turn in range(3):
            answer = client.generate(
                token_ids=prompt, model=name, max_tokens=TOKENS, temperature=0.0, ignore_eos=True
            )
            tokens = list(answer.token_ids)
            assert tokens == want[name](prompt, TOKENS, past_end=True).tokens, (name, seed, turn)
            prompt = [*prompt, *tokens, *prompt_of(20, seed=100 * seed + turn)]

    with ThreadPoolExecutor(len(names)) as pool:
        for seed in seeds:
            list(pool.map(one, names, [seed] * len(names)))


@pytest.mark.slow
def test_two_routers_fetches_kills_and_another_content(model, folders, tmp_path) -> None:
    """Pages of an adapter are fetched for it alone. What one router loads is the other one's, too;
    and so is what takes its place, also on a worker that died before."""
    third = write_adapter(model, folders["law"].parent / "third", 7)
    want, new = wanted(model, folders), {"law": answers(model, third)}
    cluster = make_cluster(
        *(model, tmp_path), prefill=2, decode=2, routers=2, failpoints="live",
        local_prefill="never", max_sequences=8, poison_freed_pages=True,
        adapters_dir=str(third.parent), operator_token=TOKEN,
    )  # fmt: skip
    cluster.own = {name: {FETCHING: "decode-0,decode-1"} for name in cluster.routers}
    load, names = "/v1/load_lora_adapter", ["tiny", "law", "poems"]
    with cluster.started(ends_well=True), ExitStack() as stack:
        for fetcher in ("prefill-0", "prefill-1"):
            for holder in ("decode-0", "decode-1"):
                cluster.wait_measured(fetcher, holder)
        for router, name in enumerate(("law", "poems")):
            body = {"lora_name": name, "lora_path": name}
            assert command(cluster, load, body, router=router)[0] == 200
        # Connections are spread over the routers.
        clients = [stack.enter_context(cluster.client(retries=True)) for _ in range(4)]
        for client in clients:
            wait_until(lambda: {one.name for one in client.models()} == set(names), 30)
        for number, client in enumerate(clients):
            talk(client, want, names, range(2 * number, 2 * number + 2))
        asked = [cluster.metric("baton_adapter_requests_total", name) for name in cluster.routers]
        assert sum(asked) == 4 * 2 * 2 * 3, "of either router"
        got = sum(
            cluster.metric(f"{Metric.FETCH_PAGES}_total", worker, direction="got")
            for worker in cluster.workers
        )
        assert got > 0
        for worker, moment in (
            ("prefill-0", "prefill.chunk=kill@1"),
            ("decode-0", "decode.tokens=kill@9"),
        ):
            cluster.arm(worker, moment)
            for turn in range(20, 40):
                talk(clients[turn % 4], want, names, range(turn, turn + 1))
                if cluster.processes[worker].poll() is not None:
                    break
            assert cluster.wait_gone(worker) < 0, "it was not killed"
        body = {"lora_name": "law", "lora_path": "third", "load_inplace": True}
        assert command(cluster, load, body, router=1)[0] == 200
        want |= new
        digests = {one.name: one.digest for one in clients[0].models()}
        for client in clients:
            wait_until(lambda: {one.name: one.digest for one in client.models()} == digests, 30)
            talk(client, want, names, range(2))
        for worker in ("prefill-0", "decode-0"):
            cluster.start(worker)
            cluster.wait_attached(worker)
        for number, client in enumerate(clients):
            talk(client, want, names, range(number, number + 2))
        cluster.check_baseline()
