"""`baton fence` at several routers, each of which has a list of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack

from http_server import Reply, http_server
from typer.testing import CliRunner

from console.cli import app

EPOCH = "4be1c0d5a9f20317"


def router(status: int, answer: Mapping[str, object]) -> AbstractContextManager[str]:
    """An admin port that answers so."""
    return http_server(lambda _: Reply(json.dumps(answer).encode(), status))


def test_a_router_that_does_not_know_it_keeps_no_other_from_hearing_it() -> None:
    with ExitStack() as stack:
        forgot = stack.enter_context(router(404, {"error": "this router knows no lost p"}))
        knows = stack.enter_context(router(200, {"worker": "p", "epoch": EPOCH}))
        words = ["fence", "p", "--epoch", EPOCH, "--admin", f"{forgot},{knows}"]
        done = CliRunner().invoke(app, words)
    assert f"p of epoch {EPOCH}: gone" in done.output
    assert done.exit_code == 1
    assert f"{forgot}: this router knows no lost p" in done.output


def test_lists_that_are_empty_say_so_and_other_servers_are_told_from_routers() -> None:
    empty: dict[str, object] = {"lost": [], "adapters": [], "workers": []}
    with router(200, empty) as admin, router(404, {"error": {"code": "not_found"}}) as other:
        for command, said in (("fence", "lost"), ("adapters", "adapter"), ("role", "attached")):
            done = CliRunner().invoke(app, [command, "--admin", admin])
            assert (done.exit_code, said in done.output.partition("no worker ")[2]) == (0, True)
            done = CliRunner().invoke(app, [command, "--admin", other])
            assert "is this a router's admin port?" in " ".join(done.output.split())
