"""A worker whose ranks are on two hosts, which are namespaces of this machine."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from adapters_kit import answers, write_adapter
from group_kit import PAIR, STRIKES, WORKER, Group, gone_within, group
from hosts_kit import NEEDS, Host, can_have_hosts
from paths_kit import prompt_of
from references import references
from tiny_families import EXPERTS
from tiny_models import write_tiny_model
from typer.testing import CliRunner
from waiting import wait_until

from baton.errors import BatonError
from console.cli import app
from telemetry.names import Metric

pytestmark = pytest.mark.skipif(not can_have_hosts(), reason=NEEDS)
PROMPT = prompt_of(100)
COMPUTED = f"{Metric.PREFILL_TOKENS}_total"


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host() as made:
        yield made


def check(group: Group, model: Path) -> None:
    with group.cluster.client() as client:
        references(model).check_client(client)


def listening(processes: list[psutil.Process]) -> set[str]:
    """Addresses at which they take connections."""
    return {
        one.laddr.ip.removeprefix("::ffff:")
        for process in processes
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }


GRIDS = [
    ("prefill-0", 2, 1, {}),
    ("prefill-0", 1, 2, {"kv_host_gib": 0.1}),
    ("decode-0", 2, 2, {}),
    ("decode-0", 1, 2, {"expert_parallel": True, "speculation": "suffix"}),
]
"""The worker on two hosts, its stages, the ranks of each, and settings."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("worker", "pp", "tp", "settings"),
    [pytest.param(*grid, marks=pytest.mark.slow if at else ()) for at, grid in enumerate(GRIDS)],
)
def test_the_tokens_are_those_of_one_process(
    worker: str, pp: int, tp: int, settings: dict[str, object], host: Host, tmp_path: Path
) -> None:
    """All ranks do their part, and listen at loopback and at their addresses in the fabric alone.
    All ends in order, though it begins at the agent."""
    experts = EXPERTS["qwen3_moe"] if "expert_parallel" in settings else {}
    model = write_tiny_model(tmp_path / "model", **experts, layers=4)
    with group(model, tmp_path, host, pp=pp, tp=tp, worker=worker, **settings) as made:
        made.start_agent()
        with made.cluster.started():
            here = pp * tp // 2
            assert (len(made.ranks_here()), len(made.ranks())) == (here - 1, 2 * here - 1)
            made.cluster.wait_measured(*PAIR)
            check(made, model)
            assert made.cluster.metric(COMPUTED, WORKER) >= 245
            assert made.cluster.metric(COMPUTED, "decode-0", source="computed") == 0
            made.cluster.check_baseline()
            assert listening([made.leader, *made.ranks_here()]) <= {"127.0.0.1", host.near}
            assert made.host.listening() <= {"127.0.0.1", host.address}
            made.agent.terminate()
            assert made.agents[0].wait(30) == 0
            assert made.cluster.wait_gone(worker) == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_adapter_reaches_the_ranks_of_another_host(host: Host, tmp_path: Path) -> None:
    """The first of two ranks there gets its memory, and leaves a note to the other one."""
    model = write_tiny_model(tmp_path / "model", layers=4)
    folder = write_adapter(model, tmp_path / "adapter")
    want = answers(model, folder)(PROMPT, 16, past_end=True).tokens
    own = {"adapters": f"a={folder}", "max_adapters": 1}
    with group(model, tmp_path, host, pp=2, tp=2, everywhere=own) as made:
        made.start_agent()
        with made.cluster.started():
            made.cluster.wait_measured(*PAIR)
            check(made, model)
            with made.cluster.client() as client:
                found = client.generate(
                    token_ids=PROMPT, model="a", max_tokens=16, temperature=0.0, ignore_eos=True
                )
            assert list(found.token_ids) == want
            assert made.cluster.metric(COMPUTED, "decode-0", source="computed") == 0
            made.cluster.check_baseline()


REFUSED = [
    ({"tp": 2}, "node 1 has tp 2, and the leader 1"),
    ({"node": 1, "nodes": 1, "fabric": "", "leader": ""}, "`node`, `leader` and `fabric` need"),
    ({"name": "prefill-1"}, "node 1 is the worker prefill-1, and the leader prefill-0"),
    ({"model": "other"}, "node 1 has another model than the leader, or another revision"),
    ({"tls_dir": "decode"}, "is not of prefill-0"),
]
"""What a second agent is told of, and why it does not join."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_who_does_not_belong_is_refused_by_name(host: Host, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", layers=4)
    other = write_tiny_model(tmp_path / "other", layers=4, hidden=128)
    with group(model, tmp_path, host) as made:
        made.cluster.start("router")
        made.cluster.start(WORKER)
        for changed, why in REFUSED:
            own = dict(changed)
            path = str(other) if own.pop("model", "") else ""
            if "tls_dir" in own:
                own["tls_dir"] = str(made.certs / own["tls_dir"])
            refused = made.start_agent(model=path, **own)
            assert refused.wait(120) != 0
            assert why in (made.logs / "agent.log").read_text(), (why, made.tail())
        made.start_agent()
        wait_until(lambda: made.host.processes("engine.ranks"), 120, show=made.tail)
        second = made.start_agent()
        assert second.wait(120) == 1
        assert "node 1 has joined already: two hosts have one number" in made.tail()
        assert made.host.processes("engine.ranks"), "the first goes on"


LOST_S = 4.0
GRACE_S = 3.0
"""What a machine with eight other sessions may add."""
PHASES = {
    "start": WORKER,
    "idle": WORKER,
    "prefill": WORKER,
    "decode": "decode-0",
    "shutdown": WORKER,
}
"""What the group does meanwhile, and which worker it is. Prompts are handed off chunk by chunk."""
VICTIMS = ("rank", "agent", "leader")
HOWS = ("killed", "stopped", "cut")
CASES = [
    (victim, how, phase)
    for phase in PHASES
    for victim in VICTIMS
    for how in HOWS
    if how != "cut" or victim == "rank"
]
"""A cable has no victim of its own."""


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("phase", PHASES)
def test_a_lost_part_loses_the_group(phase: str, host: Host, tmp_path: Path) -> None:
    """Within four seconds every rank has ended, and every process that is not stopped. Once
    witnesses have said so, all pages of the decode worker are free again."""
    model, worker = write_tiny_model(tmp_path / "model", layers=4), PHASES[phase]
    (peer,) = {*PAIR} - {worker}
    with group(model, tmp_path, host, worker=worker) as made:
        made.start_agent()
        with made.cluster.started(), ThreadPoolExecutor(4) as threads:
            made.cluster.wait_measured(*PAIR)
            for victim, how in [(v, h) for v, h, p in CASES if p == phase]:
                took_s = strike(made, victim, how, phase, threads)
                print(f"{phase} {victim} {how}: lost after {took_s:.1f} s")
                codes = made.cluster.wait_gone(worker), made.agents[-1].wait(60)
                assert all(codes) or phase == "shutdown", "there it may be over already"
                assert not host.processes("baton"), "something is left there"
                whole = made.cluster.baselines[peer]
                wait_until(
                    lambda whole=whole: made.cluster.available_pages(peer) == whole,
                    30,
                    show=made.tail,
                )
                made.restart()
            check(made, model)
            made.cluster.check_baseline()


def strike(made: Group, victim: str, how: str, phase: str, threads: ThreadPoolExecutor) -> float:
    """Strikes, and returns how long it took until nothing was left that is not stopped."""
    if phase == "start":
        made.cluster.kill(WORKER)
        made.agents[-1].wait(60)
        made.start_agent()
        made.cluster.start(WORKER)
        wait_until(lambda: made.host.processes("engine.ranks"), 120, show=made.tail)
    if phase not in ("start", "idle"):
        for number in range(4):
            threads.submit(ask, made, number, 300 if phase == "decode" else 12)
        whole = made.cluster.baselines["decode-0"]
        wait_until(lambda: made.cluster.available_pages("decode-0") < whole, 30, show=made.tail)
    (rank,) = made.host.processes("engine.ranks")
    struck = {"rank": rank, "agent": made.agent, "leader": made.leader}[victim]
    rest = [rank, made.agent, made.leader]
    if phase == "shutdown":
        made.cluster.processes[made.worker].send_signal(signal.SIGTERM)
        time.sleep(0.05)
    began_s = time.monotonic()
    if how == "cut":
        made.host.cut()
    else:
        with suppress(psutil.NoSuchProcess):
            struck.send_signal(STRIKES[how])
    gone_within(rest, LOST_S + GRACE_S)
    took_s = time.monotonic() - began_s
    made.host.mend()
    return took_s


def ask(made: Group, number: int, max_tokens: int = 12) -> None:
    """A long prompt, of which nobody knows whether it is answered."""
    prompt = np.random.default_rng(number).integers(1, 384, 1500).tolist()
    with suppress(BatonError), made.cluster.client() as client:
        client.generate(token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_rank_0_has_reaped_has_a_witness(host: Host, tmp_path: Path) -> None:
    """Nothing is started again: the guards alone say that all have ended."""
    model = write_tiny_model(tmp_path / "model", layers=4)
    with group(model, tmp_path, host, pp=2, tp=2) as made:
        made.start_agent()
        with made.cluster.started():
            made.cluster.wait_measured(*PAIR)
            admin = dict(made.cluster.plan.router_admin_addresses)["router"]
            (rank,) = made.ranks_here()
            rank.kill()
            made.cluster.wait_gone(WORKER)
            assert made.agents[-1].wait(60) != 0
            wait_until(lambda: not listed(admin), 20, show=lambda: (listed(admin), made.tail()))
            del made.cluster.baselines[WORKER]
            made.cluster.check_baseline()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_without_power_is_fenced(host: Host, tmp_path: Path) -> None:
    """All of it ends at once, and nothing there is started again. Neither is the leader. So a
    router that is has only the word of the decode worker, whose pages wait."""
    model = write_tiny_model(tmp_path / "model", layers=4)
    with group(model, tmp_path, host) as made, ThreadPoolExecutor(4) as threads:
        made.start_agent()
        with made.cluster.started(killed=True):
            made.cluster.wait_measured(*PAIR)
            own = made.cluster.baselines["decode-0"]
            epoch = made.cluster.identity(WORKER).epoch
            admin = dict(made.cluster.plan.router_admin_addresses)["router"]
            assert fenced(admin, WORKER, f"{epoch:x}")[1] == "is attached"
            asked = [threads.submit(ask, made, number) for number in range(4)]
            wait_until(lambda: made.cluster.available_pages("decode-0") < own, 30, show=made.tail)
            for process in host.processes():  # The cable stays: this machine's end needs it.
                process.kill()
            made.cluster.wait_gone(WORKER)
            # The leader's host bears witness of rank 0 alone.
            left = [(WORKER, f"{epoch:016x}", 1)]
            wait_until(lambda: listed(admin) == left, 20, show=lambda: (listed(admin), made.tail()))
            for each in asked:
                each.result(60)
            made.cluster.kill("router")
            made.cluster.start("router")
            left = [(WORKER, f"{epoch:016x}", 2)]
            wait_until(lambda: started_again(admin) and listed(admin) == left, 60, show=made.tail)
            assert fenced(admin, WORKER, f"{epoch:x}")[0] == 0
            assert listed(admin) == []
            del made.cluster.baselines[WORKER]  # It is gone for good.
            made.cluster.check_baseline()


def started_again(admin: str) -> bool:
    """Whether the router answers."""
    with suppress(OSError):
        return bool(listed(admin) or True)
    return False


def listed(admin: str) -> list[tuple[str, str, int]]:
    """Lost workers of which something is unseen: name, epoch, processes."""
    with urllib.request.urlopen(f"http://{admin}/fence", timeout=10) as answer:
        found = json.load(answer)["lost"]
    return [(one["worker"], one["epoch"], one["processes"]) for one in found]


def fenced(admin: str, worker: str, epoch: str) -> tuple[int, str]:
    """What `baton fence` ends with, and whether it says that the worker is attached."""
    words = ["fence", worker, "--epoch", epoch, "--admin", admin]
    done = CliRunner().invoke(app, words, env={"BATON_OPERATOR_TOKEN": "token"})
    return done.exit_code, "is attached" if "is attached" in done.output else ""
