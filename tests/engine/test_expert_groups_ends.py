"""What the end of a worker of an expert group does: killed, stopped, or a step that fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_kit import build, finish, submit
from expert_groups_kit import grouped, member
from paths_kit import prompt_of
from tiny_families import EXPERTS
from tiny_models import write_tiny_model
from waiting import wait_until

from engine.engine import Engine, EngineError
from engine.expert_groups.leader import SOCKET, Leader

pytestmark = pytest.mark.timeout(300)
GONE_S = 4.0


def test_the_others_are_told_when_one_ends(tmp_path, caplog):
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **EXPERTS["mixtral"])
    with grouped(path, tmp_path / "group", 2) as engines:
        run = submit(engines[0], prompt_of(20), 2000, ignore_eos=True)
        engines[1].stop()
        assert run.done.wait(GONE_S)
        assert run.failed is not None
        wait_until(lambda: engines[0].lost, GONE_S)
        assert re.search(
            "rank 1 of the expert group is gone|connection to another", engines[0].lost
        )
        wait_until(lambda: f"the expert group is lost: {engines[0].lost}" in caplog.text, GONE_S)
    assert caplog.text.count("the expert group is lost") == 1, "one of them left by itself"
    assert [entry.name for entry in (tmp_path / "group").iterdir()] == ["lock"]


VICTIM = """
import sys, time
from pathlib import Path
from engine_kit import build
phase, model, place = sys.argv[1:]

def stand(*_, **__):
    print("there", flush=True)
    time.sleep(600)

if phase == "loading":
    from engine.model import loading
    loading.fill = stand
if phase == "made ready":
    from engine import engine
    engine.build_executor = stand
build(Path(model), expert_group=place)
stand()
"""
PHASES = ("loading", "made ready", "idle", "busy")
STRUCK = [(how, rank, at) for how in ("KILL", "STOP") for rank in (0, 1) for at in PHASES]


@pytest.mark.matrix
@pytest.mark.parametrize(("how", "rank", "phase"), STRUCK)
def test_a_struck_worker_ends_the_others(how, rank, phase, tmp_path):
    """Also while they read weights, and while their steps wait for it."""
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **EXPERTS["mixtral"])
    place = f"{tmp_path / 'group'}?rank={{}}&ranks=2"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", VICTIM, phase, str(path), place.format(rank)]
    engines: list[Engine] = []
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child,
        ThreadPoolExecutor(1) as threads,
    ):
        try:
            building = threads.submit(build, path, expert_group=place.format(1 - rank))
            assert child.stdout is not None
            assert child.stdout.readline() == b"there\n"
            told: list[str] = []
            if phase in ("idle", "busy"):
                engines.append(building.result(60))
                own, loop = engines[0].ranks, engines[0]._loop
                own.call_when_lost(lambda why: (loop.lose(), told.append(why)))
            if phase == "busy":
                run = submit(engines[0], prompt_of(20), 2000, ignore_eos=True)
                wait_until(lambda: run.tokens[0])
            child.send_signal(getattr(signal, f"SIG{how}"))
            if not engines:
                with pytest.raises(EngineError, match="expert group"):
                    building.result(GONE_S)
            for engine in engines:
                wait_until(lambda: told, GONE_S)
                assert engine.lost == told[0]
            if phase == "busy":
                assert run.done.wait(GONE_S)
                assert run.failed is not None
        finally:
            child.kill()
            for engine in engines:
                engine.stop()
    Leader(tmp_path / "group", 2).close()
    assert [entry.name for entry in (tmp_path / "group").iterdir()] == ["lock"]


STANDS = """
import os, signal, socket, sys
own, path = socket.socket(socket.AF_UNIX), sys.argv[1]
if sys.argv[2] == "0":
    own.bind(path)
    own.listen()
else:
    own.connect(path)
    own.sendall(b'{"rank": 1, "ranks": 2}\\n')
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_is_stopped_is_lost(rank, tmp_path):
    """Though its connection stands. Nothing is asked of it meanwhile."""
    leads = [Leader(tmp_path, 2)] if rank else []
    command = [sys.executable, "-S", "-c", STANDS, str(tmp_path / SOCKET), str(rank)]
    with subprocess.Popen(command) as child:
        try:
            other = member(tmp_path, 1 - rank)
            wait_until(lambda: other.lost, GONE_S)
            assert other.lost == f"rank {rank} of the expert group is stopped"
        finally:
            child.kill()
    for each in (other, *leads):
        each.close()


def test_a_step_that_fails_between_layers_ends_the_group(tmp_path, monkeypatch):
    """The others wait in it, and the worker may have no step any more."""
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **EXPERTS["mixtral"])
    with grouped(path, tmp_path / "group", 2) as engines:
        finish(submit(engines[0], prompt_of(5), 2, ignore_eos=True))
        told = [load.pairs for engine in engines for load in engine.ranks.loads()]
        assert sum(told) % (2 * 2 * 6) == 0, "two experts of each token, in two layers"
        assert min(told) > 0
        dispatch = engines[0].ranks.dispatch
        combine, count = dispatch.combine, []

        def fails_once(out: Any) -> Any:
            count.append(1)
            if len(count) == 1:
                raise RuntimeError("an error between two layers")
            return combine(out)

        monkeypatch.setattr(dispatch, "combine", fails_once)
        run = submit(engines[0], prompt_of(20), 40, ignore_eos=True)
        assert run.done.wait(10)
        wait_until(lambda: engines[0].lost and engines[1].lost, 10)
        assert "failed between two layers" in engines[0].lost
