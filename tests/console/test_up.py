"""A router and workers as processes: ready, drained, and failures before they are ready."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from http_server import Asked, Reply, http_server
from waiting import until

from baton.addresses import CannotListenError
from console import up
from console.ports import PortPicker
from console.supervisor import ProcessSpec
from engine.step.dispatch import place_of
from worker.settings import Role

FAKE = str(Path(__file__).with_name("fake_process.py"))


class Pages:
    """A router's admin port: it says that it is well from the second time on that it is asked, and
    then lists one more attached worker every time."""

    workers = ("prefill-0", "decode-0")

    def __init__(self) -> None:
        self.asked = {"/health/ready": 0, "/discovery": 0}
        self.address = ""

    def __call__(self, asked: Asked) -> Reply:
        before = self.asked[asked.path]
        self.asked[asked.path] += 1
        targets = [{"targets": [], "labels": {"worker": name}} for name in self.workers[:before]]
        status = 200 if before or asked.path == "/discovery" else 503
        return Reply(json.dumps(targets).encode(), status)


@pytest.fixture(params=[1, 2], ids="{} routers".format)
def routers(request: pytest.FixtureRequest) -> Iterator[list[Pages]]:
    """The admin ports of so many."""
    with ExitStack() as stack:
        pages = [Pages() for _ in range(request.param)]
        for page in pages:
            page.address = stack.enter_context(http_server(page))
        yield pages


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, routers: list[Pages]) -> up.UpPlan:
    """A real plan whose processes are fakes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = up.UpOptions("/m", routers=len(routers), grpc_port=0, http_port=0, admin_port=0)
    plan = up.plan(replace(options, drain_s=10))
    addresses = dict(plan.worker_addresses)
    specs = tuple(
        replace(spec, argv=[sys.executable, FAKE, addresses.get(spec.name, "127.0.0.1:0")])
        for spec in plan.specs
    )
    names = (name for name, _ in plan.router_admin_addresses)
    admins = tuple(zip(names, (pages.address for pages in routers), strict=True))
    return replace(plan, specs=specs, router_admin_addresses=admins)


async def test_up_waits_for_all_and_drains_the_routers_first(
    plan: up.UpPlan, routers: list[Pages]
) -> None:
    lines: list[tuple[str, str]] = []
    waited_for: list[str] = []
    async with up.running(plan, lambda *line: lines.append(line)) as supervisor:
        await up.wait_until_ready(plan, supervisor, waited_for.append)
        assert supervisor.settled
        for pages in routers:
            assert pages.asked == {"/health/ready": 4, "/discovery": 3}, "ready before it was"
        # They say so once they serve, and a pipe lies between.
        await until(lambda: said(lines, "serving") == set(supervisor.pids()))
    names = [name for name, _ in plan.router_admin_addresses]
    assert waited_for[0] == "prefill-0, decode-0"
    assert waited_for[-len(names) :] == names
    drained = [name for name, line in lines if line == "drained"]
    assert sorted(drained[: len(names)]) == names
    assert sorted(drained[len(names) :]) == ["decode-0", "prefill-0"]


def said(lines: list[tuple[str, str]], what: str) -> set[str]:
    """Names of the processes that did."""
    return {name for name, line in lines if line == what}


async def test_a_worker_that_cannot_start_is_an_error_at_once(plan: up.UpPlan) -> None:
    broken = ProcessSpec("decode-0", [sys.executable, "-c", "raise SystemExit('no such model')"])
    plan = replace(plan, specs=(*plan.specs[:-1], broken))
    lines: list[tuple[str, str]] = []
    with pytest.raises(up.UpError, match="decode-0 exited with status 1"):
        async with up.running(plan, lambda *line: lines.append(line)) as supervisor:
            await up.wait_until_ready(plan, supervisor)
    assert ("decode-0", "no such model") in lines
    assert supervisor.pids() == {}


FLAGS = ("--listen", "--http-listen", "--internal-listen", "--admin")


def flags_of(spec: ProcessSpec) -> dict[str, str]:
    """The flags of its command line that have a value."""
    return dict(zip(spec.argv, spec.argv[1:], strict=False))


@pytest.mark.parametrize("routers", [1, 3])
def test_no_two_processes_get_the_same_port_unless_they_are_to_share_it(
    monkeypatch: pytest.MonkeyPatch, routers: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = up.plan(up.UpOptions(model="/m", prefill=2, decode=2, routers=routers))
    doors = {plan.router_address, plan.http_address}
    own = [
        flags[name]
        for flags in map(flags_of, plan.specs)
        for name in FLAGS
        if name in flags and flags[name] not in doors
    ]
    assert len(own) == 2 * routers + 2 * 4
    assert len({*own, *doors}) == len(own) + 2


async def test_workers_of_a_role_share_experts_in_a_folder_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single worker of a role shares them with nobody."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = up.UpOptions("/m", prefill=1, decode=2, both=3, share_experts=True, **OWN_PORTS)
    plan = up.plan(options)
    folder = Path(plan.experts_folder)
    places = {spec.name: flags_of(spec).get("--expert-group") for spec in plan.specs}
    assert places == {
        "router": None,
        "prefill-0": None,
        **{f"decode-{rank}": f"{folder}/decode?rank={rank}&ranks=2" for rank in range(2)},
        **{f"both-{rank}": f"{folder}/both?rank={rank}&ranks=3" for rank in range(3)},
    }
    assert place_of(str(places["both-2"])) == (folder / "both", 2, 3)
    async with up.running(replace(plan, specs=()), lambda *_: None):
        assert stat.filemode(os.stat(folder).st_mode) == "drwx------"
    with pytest.raises(FileNotFoundError):
        os.stat(folder)


def test_several_routers_share_clients_workers_and_one_store_of_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = up.plan(up.UpOptions("/m", routers=2, grpc_port=0, http_port=0, admin_port=0))
    routers, workers = plan.specs[:2], plan.specs[2:]
    assert [spec.name for spec in routers] == ["router-0", "router-1"]
    for spec in routers:
        flags = flags_of(spec)
        assert (flags["--listen"], flags["--http-listen"]) == (
            plan.router_address, plan.http_address
        )  # fmt: skip
        assert (flags["--name"], flags["--admin"]) in plan.router_admin_addresses
        assert "--reuse-port" in spec.argv
    internal = [flags_of(spec)["--internal-listen"] for spec in routers]
    for spec in workers:
        assert flags_of(spec)["--routers"] == ",".join(internal)
    assert {flags_of(spec)["--otlp-endpoint"] for spec in plan.specs} == {f"http://{internal[0]}"}
    assert ["--trace-store" in spec.argv for spec in plan.specs] == [True, False, False, False]
    assert plan.admin_address == plan.router_admin_addresses[0][1]


def test_spans_go_to_the_operators_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    there = "http://collector:4317"
    plan = up.plan(up.UpOptions("/m", otlp_endpoint=there, **OWN_PORTS))
    assert {flags_of(spec)["--otlp-endpoint"] for spec in plan.specs} == {there}
    assert not any("--trace-store" in spec.argv for spec in plan.specs)


def test_an_internal_port_is_never_where_clients_expect_a_router() -> None:
    with PortPicker() as ports:
        usual = int(ports.pick(0, 0).rpartition(":")[2])  # It is held.
        picked = ports.pick(None, usual, never=range(usual + 1, usual + 50))
    assert int(picked.rpartition(":")[2]) >= usual + 50


OWN_PORTS = {"grpc_port": 0, "http_port": 0, "admin_port": 0}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "baton.example", ""])
def test_nobody_is_served_from_afar_without_a_key(host: str) -> None:
    with pytest.raises(up.UpError, match="BATON_API_KEY or --api-key"):
        up.UpOptions("/m", host=host)
    with pytest.raises(up.UpError, match="BATON_API_KEY or --api-key"):
        up.UpOptions("/m", http_host=host or "0.0.0.0")
    assert up.UpOptions("/m", host=host, has_tokens=True).asks_for_key
    assert not up.UpOptions("/m", host="::1", http_host="localhost").asks_for_key


def test_only_the_doors_for_clients_are_opened_and_only_routers_get_the_key() -> None:
    options = up.UpOptions("/m", device="cpu", host="0.0.0.0", api_key="sk-1", **OWN_PORTS)
    plan = up.plan(options)
    router, *workers = plan.specs
    flags = flags_of(router)
    assert flags["--listen"] == plan.router_address
    assert plan.router_address.startswith("0.0.0.0:")
    assert flags["--http-listen"].startswith("0.0.0.0:")
    assert flags["--internal-listen"].startswith("127.0.0.1:")
    assert flags["--admin"].startswith("127.0.0.1:")
    assert router.environment["BATON_API_KEY"] == "sk-1"
    assert "sk-1" not in " ".join(router.argv), "others of the host can read it"
    assert all("BATON_API_KEY" not in worker.environment for worker in workers)
    for worker in workers:
        assert flags_of(worker)["--listen"].startswith("127.0.0.1:")


def test_ranks_by_role(monkeypatch) -> None:
    """Each rank of a worker has a GPU, in turn."""
    both = up.UpOptions("model", both=1, tp=2, grpc_port=0, http_port=0)
    options = replace(both, tp_of={Role.PREFILL: 1, Role.DECODE: None})
    plan = up.plan(replace(options, device="cpu"))
    ranks = {spec.name: flags_of(spec).get("--tp") for spec in plan.specs}
    assert ranks == {"router": None, "prefill-0": None, "decode-0": "2", "both-0": "2"}
    assert plan.workers_on == {"": 3}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    plan = up.plan(options)
    gpus = {spec.name: spec.environment.get("CUDA_VISIBLE_DEVICES") for spec in plan.specs}
    assert gpus == {"router": None, "prefill-0": "4", "decode-0": "5,6", "both-0": "7,4"}
    share = {spec.name: flags_of(spec).get("--gpu-memory-utilization") for spec in plan.specs}
    assert plan.workers_on == {"4": 2, "5": 1, "6": 1, "7": 1}
    assert share["decode-0"] is None
    assert float(share["prefill-0"]) == float(share["both-0"]) < 0.5
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(up.UpError, match="a worker of 2 ranks needs 2 GPUs, and 1 can be seen"):
        up.plan(options)


def test_a_host_of_another_machine_is_told_so() -> None:
    with pytest.raises(CannotListenError, match=r"203\.0\.113\.9.*--host"):
        up.plan(up.UpOptions("/m", device="cpu", host="203.0.113.9", api_key="k", **OWN_PORTS))
