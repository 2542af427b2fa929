"""The services of the compose file run, are scaled and stop, as processes: see `compose_kit`."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from compose_kit import MAX_TOKENS, Container, Host, ask
from waiting import wait_until

from serving.models import demo_model

pytestmark = pytest.mark.timeout(300)  # several processes start, on a machine that may be shared


def claims(host: Host) -> dict[str, str]:
    """Who wrote itself into which slot last."""
    return {
        path.stem.removeprefix("gpu-"): path.read_text().strip()
        for path in sorted((host.folder / "slots").glob("*.lock"))
    }


def attached(host: Host, router_ip: str = "") -> set[str]:
    """Workers, to the first router unless told otherwise."""
    url = f"http://{router_ip or host.router_ip}:9090/discovery"
    with urllib.request.urlopen(url, timeout=5) as answer:
        return {target["labels"]["worker"] for target in json.load(answer)}


def wait_attached(host: Host, wanted: set[str]) -> None:
    wait_until(lambda: attached(host) == wanted, show=lambda: (attached(host), wanted))


def test_it_answers_over_a_hand_off(host: Host) -> None:
    assert ask(host, "Hello", 20).usage.output_tokens == 20
    assert set(claims(host).values()) == {"prefill-2", "decode-3"}


def test_a_router_without_workers_is_alive_and_not_healthy(host: Host) -> None:
    assert host.healthy_alone is False


def test_decode_is_scaled_to_three_and_back_under_load(host: Host) -> None:
    more = [host.up("decode"), host.up("decode")]
    for container in more:
        container.wait_healthy()
    names = {"prefill-2", "decode-3", "decode-4", "decode-5"}
    wait_attached(host, names)
    assert set(claims(host).values()) == names  # four workers, four GPUs

    one_too_many = host.up("decode")
    assert one_too_many.process is not None
    assert one_too_many.process.wait(60) == 1
    assert "no GPU is left here for decode-6" in one_too_many.log
    assert "by prefill-2" in one_too_many.log

    over = threading.Event()
    with ThreadPoolExecutor(12) as pool, ThreadPoolExecutor(2) as stopping:
        running = [pool.submit(keep_asking, host, number, over) for number in range(12)]
        try:
            wait_decoding(more)
            stopped = list(stopping.map(Container.stop, more))
        finally:
            over.set()
        lengths = {tokens for asked in running for tokens in asked.result(60)}
    assert lengths == {MAX_TOKENS}
    for (code, took_s), container in zip(stopped, more, strict=True):
        assert code == 0, container.log
        assert took_s < container.grace_s - 15
    wait_attached(host, {"prefill-2", "decode-3"})
    assert ask(host, "And on", 5).usage.output_tokens == 5


def keep_asking(host: Host, number: int, over: threading.Event) -> list[int]:
    """One request after the other; output tokens of each."""
    found: list[int] = []
    while not over.is_set():
        result = ask(host, f"Request {number}, {len(found)}")
        found.append(result.usage.output_tokens)
    return found


def wait_decoding(workers: list[Container]) -> None:
    """Until each has work that a drain must wait for."""
    deadline = time.monotonic() + 30
    waiting = {worker.words["0.0.0.0"] for worker in workers}
    while waiting:
        assert time.monotonic() < deadline, waiting
        for ip in list(waiting):
            with urllib.request.urlopen(f"http://{ip}:9090/metrics", timeout=5) as answer:
                found = re.search(
                    r"^baton_running_sequences (\S+)$", answer.read().decode(), re.MULTILINE
                )
            if found and float(found[1]) > 0:
                waiting.remove(ip)


def test_a_killed_workers_gpu_goes_to_its_successor(host: Host) -> None:
    (lost,) = [one for one in host.containers if one.name == "decode-3"]
    slot = next(gpu for gpu, holder in claims(host).items() if holder == "decode-3")
    lost.kill()
    lost.start()  # what the restart policy does
    lost.wait_healthy()
    wait_attached(host, {"prefill-2", "decode-3"})
    assert f"gpu={slot}" in lost.log.rpartition("GPU claimed")[2].splitlines()[0]
    assert ask(host, "Again", 5).usage.output_tokens == 5


def test_the_other_profiles_workers_serve_and_drain(host: Host) -> None:
    """cpu with a small model in the demo's place; rdma on the host's network, without a NIC."""
    demo = host.folder / "cache" / "models" / demo_model.MODEL_NAME
    shutil.copytree(host.folder / "models" / "tiny", demo)
    demo_model._write_marker(demo)
    routers = {"127.0.0.1:50050": f"{host.router_ip}:50050"}
    workers = [host.up("prefill-cpu"), host.up("decode-cpu")]
    workers += [host.up("prefill-rdma", **routers), host.up("decode-rdma", **routers)]
    for worker in workers:
        worker.wait_healthy()
    wait_attached(host, {"prefill-2", "decode-3", *(worker.name for worker in workers)})
    with host.client() as client:
        assert {model.name for model in client.models()} == {"tiny", demo_model.MODEL_NAME}
        result = client.generate("Hi", model=demo_model.MODEL_NAME, max_tokens=5, ignore_eos=True)
        assert result.usage.output_tokens == 5
    with ThreadPoolExecutor(4) as pool:
        assert [code for code, _ in pool.map(Container.stop, workers)] == [0] * 4


def test_the_router_is_scaled_to_two_and_back(host: Host) -> None:
    """Workers find the second one behind the name of the first, use it, and let it go."""
    workers = [one for one in host.containers if one.name in ("prefill-2", "decode-3")]
    second = host.up("router")
    second.wait_healthy()
    ip = second.words["0.0.0.0"]
    wait_until(lambda: attached(host, ip) == {"prefill-2", "decode-3"})
    with host.client(ip) as client:
        result = client.generate("Hello", max_tokens=5, ignore_eos=True)
    assert result.usage.output_tokens == 5
    assert attached(host) == {"prefill-2", "decode-3"}
    host.forget(second)
    assert second.stop()[0] == 0
    for worker in workers:
        worker.wait_logged(f"router gone, and so is its address  router={ip}:50050")
    assert ask(host, "And on", 5).usage.output_tokens == 5
    assert f"its address  router={host.router_ip}:" not in "".join(one.log for one in workers)


def test_everything_stops_within_its_grace(host: Host) -> None:
    running = [one for one in host.containers if one.process and one.process.poll() is None]
    assert {one.name for one in running} == {"router-1", "prefill-2", "decode-3"}
    with ThreadPoolExecutor(3) as pool:
        stopped = list(pool.map(Container.stop, running))
    assert [code for code, _ in stopped] == [0, 0, 0]
