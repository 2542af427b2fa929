"""CPU that a router takes for each token of its streams, and for each request.

    python -m bench.stream_cost --crowd [--parts] [--tls] [--door grpc|http|fast] [--streams N]
    python -m bench.stream_cost --requests [--chat] [--door grpc|http|fast] [--parts]
    python -m bench.stream_cost --crowd --routers N --cores "0 1 2,3 4-15"

The crowd: whole routers, as their process composes them (`bench.crowd`). Tokens that come faster
than a router can write them share a message: the line says how many did, and steps further apart
give the cost of a token by itself. `--parts` says where the time of the loop's thread goes;
`--callbacks` measures each callback of the loop, which is asyncio's own then, and slower.

Requests: prompts of `--prompt` ids, or conversations of about that length, that get 8 tokens, each
in a message of its own, by a hand-off from a prefill to a decode worker. As many as `--streams` run
at once, so the time of a request here is mostly the 8 steps.

Several routers: the tokens of all of them, beside those of one. `--cores` pins the processes: a set
of cores for each router, then one for the workers, then one for the clients. Steps of 1 ms are more
than a router can write, so this is what they can do at most:

    python -m bench.stream_cost --crowd --door http --step-ms 1 --routers 2 \\
        --cores "0 1 2-7 8-15" --runs 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bench.crowd import Crowd, Reading, a_process, be, write_tokenizer
from bench.parts import LONG_S, Callbacks
from serving.net.certificates import write_set

RUNS = 3
WARM_UP_S = 1.5
SMALLEST_SHARE = 0.01


async def run_crowd(
    crowd: Crowd, seconds: float, routers: int, cores: Sequence[str]
) -> list[tuple[Reading, Reading]]:
    """Each router before and behind some seconds of its load.

    Raises:
        RuntimeError: the clients ended; they have said why.
    """
    *of_routers, of_workers, of_clients = cores or [""] * (routers + 2)
    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(a_process("router", crowd, (), of_router))
            for of_router in of_routers[:routers]
        ]
        doors, internal, admin = zip(*[await _line(one) for one in running], strict=True)
        await stack.enter_async_context(a_process("workers", crowd, internal, of_workers))
        for address in admin:
            await _ready(address)
        clients = await stack.enter_async_context(a_process("clients", crowd, doors, of_clients))
        ended = asyncio.create_task(clients.wait())
        while not all([(await _read(one)).tokens for one in running]) and not ended.done():
            await asyncio.sleep(0.1)
        await asyncio.sleep(WARM_UP_S)
        begun = [await _read(one) for one in running]
        await asyncio.sleep(seconds)
        if ended.done():
            raise RuntimeError("the clients failed")
        readings = [(before, await _read(one)) for before, one in zip(begun, running, strict=True)]
        ended.cancel()
    return readings


async def _line(process: asyncio.subprocess.Process) -> list[str]:
    assert process.stdout is not None
    return list(json.loads(await process.stdout.readline()))


async def _read(router: asyncio.subprocess.Process) -> Reading:
    assert router.stdin is not None
    router.stdin.write(b"\n")
    return Reading(*await _line(router))  # type: ignore[arg-type]


async def _ready(admin: str) -> None:
    """Waits until a router has read the tokenizer: reading it in a process aside takes seconds, and
    requests would wait for it."""
    host, _, port = admin.rpartition(":")
    while True:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health/ready HTTP/1.0\r\nhost: localhost\r\n\r\n")
        answer = await reader.read()
        writer.close()
        if b" 200 " in answer[:20]:
            return
        await asyncio.sleep(0.05)


def print_crowd(crowd: Crowd, readings: Sequence[tuple[Reading, Reading]]) -> None:
    """One line, and one for each part of the first router's time."""
    cpu_s = sum(after.cpu_s - before.cpu_s for before, after in readings)
    loop_s = sum(after.loop_s - before.loop_s for before, after in readings)
    wall_s = readings[0][1].wall_s - readings[0][0].wall_s
    tokens = sum(after.tokens - before.tokens for before, after in readings)
    messages = sum(after.messages - before.messages for before, after in readings)
    what = f"{crowd.door}{', TLS' * crowd.tls}, {len(readings)} x {crowd.streams} streams"
    if crowd.prompt_tokens:
        count = sum(after.requests - before.requests for before, after in readings)
        kind = "chat" if crowd.chat else "ids"
        cost = (
            f"{crowd.prompt_tokens} + {crowd.output_tokens} ({kind}): {cpu_s / count * 1e3:5.2f} ms"
            f" of CPU a request ({loop_s / count * 1e3:5.2f} on the loop), {count / wall_s:.0f}/s"
        )
    else:
        count = tokens
        cost = (
            f"steps of {crowd.step_s * 1e3:g} ms: {cpu_s / count * 1e6:5.1f} us of CPU a token "
            f"({loop_s / count * 1e6:.1f} on the loop), {tokens / messages:4.2f} tokens a message, "
            f"{tokens / wall_s:6.0f} tokens/s"
        )
    print(f"{what}, {cost}, {cpu_s / wall_s:4.0%} of a core, {_load()}", flush=True)
    for part, share in readings[0][1].parts.items():
        if share >= SMALLEST_SHARE:
            print(f"    {part:20} {share:4.0%} {share * loop_s / count * 1e6:7.1f} us", flush=True)
    for _, after in readings if crowd.callbacks else ():
        seen = Callbacks(*after.callbacks)
        long = sum(many for many, _, _ in seen.long.values())
        print(
            f"    {seen.ended} callbacks, {seen.ended / count:.0f} each, {long / seen.ended:.1%} "
            f"longer than {LONG_S * 1e3:g} ms:",
            flush=True,
        )
        for name, (many, all_s, longest_s) in sorted(seen.long.items(), key=lambda one: -one[1][1]):
            mean, longest = 1e3 * all_s / many, 1e3 * longest_s
            shown = f"{many / count:5.2f} each, mean {mean:.2f}, longest {longest:.2f} ms"
            print(f"        {name:50} {shown}", flush=True)


def _load() -> str:
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def measure(args: argparse.Namespace) -> None:
    """Runs the crowd, or the requests."""
    cores = args.cores.split()
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        write_set(Path(folder), (), (), days=1)
        crowd = Crowd(
            args.door,
            args.streams or (32 if args.requests else 128),
            args.step_ms / 1e3,
            folder,
            args.tls,
            args.prompt if args.requests else 0,
            args.output,
            args.chat,
            args.parts,
            args.callbacks,
        )
        for run in range(args.runs):
            for routers in sorted({1, args.routers}, reverse=bool(run % 2)):
                own = [*cores[:routers], *cores[args.routers :]]
                with asyncio.Runner() as runner:
                    print_crowd(crowd, runner.run(run_crowd(crowd, args.seconds, routers, own)))


def main() -> None:
    """Prints a line for each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--crowd", action="store_true", help="streams; the default")
    kinds.add_argument("--requests", action="store_true")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a request's prompt")
    parser.add_argument("--output", type=int, default=8, help="tokens of a request's answer")
    parser.add_argument("--chat", action="store_true", help="requests are conversations")
    parser.add_argument("--parts", action="store_true", help="where the loop's time goes")
    parser.add_argument("--callbacks", action="store_true", help="how long the loop's take")
    parser.add_argument("--door", choices=("grpc", "http", "fast"), default="grpc")
    parser.add_argument("--streams", type=int, default=0, help="of each router, at once")
    parser.add_argument("--step-ms", type=float, default=8)
    parser.add_argument("--seconds", type=float, default=5, help="measured of the crowd")
    parser.add_argument("--tls", action="store_true", help="of the crowd's door")
    parser.add_argument("--routers", type=int, default=1, help="beside one")
    parser.add_argument("--cores", default="", help="of routers, workers and clients")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--as", dest="role", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        be(*args.role)
    else:
        measure(args)


if __name__ == "__main__":
    main()
