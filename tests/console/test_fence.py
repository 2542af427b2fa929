"""`baton fence` at several routers, each of which has a list of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from typer.testing import CliRunner

from console.cli import app


@contextmanager
def router(status: int, answer: Mapping[str, object]) -> Iterator[str]:
    """An admin port that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_router_that_does_not_know_it_keeps_no_other_from_hearing_it() -> None:
    with ExitStack() as stack:
        forgot = stack.enter_context(router(404, {"error": "this router knows no lost p"}))
        knows = stack.enter_context(router(200, {"worker": "p", "epoch": "7"}))
        words = ["fence", "p", "--epoch", "7", "--admin", f"{forgot},{knows}"]
        done = CliRunner().invoke(app, words)
    assert "p of epoch 7: gone" in done.output
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
