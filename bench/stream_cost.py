"""CPU that a router's gRPC door takes for each token of a stream, by how many share a message.

python -m bench.stream_cost [--tokens N]

The door runs here, over a dispatcher that hands it tokens; the reader is a process of its own,
whose time does not count. Tokenizing is left out (`omit_text`), and so are the workers:
`bench.step_cost` has those. A message holds one token for as long as its reader keeps up, so these
are the costs at both ends of what a slow reader is worth.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Sequence

import grpc.aio

from baton.grpc_options import server_options
from baton.worker.v1 import worker_pb2
from router.frontdoor import InferenceService
from router.jobs import ChoiceEnded, Job, JobEvent, JobFinished, JobStarted, JobTokens, ServedModel
from router.tokenization import Tokenizers

MODEL = ServedModel("bench", "r", "/nowhere", 1 << 20, 1 << 16, (), 16)
READER = """
import sys
from baton.client import Client
with Client(sys.argv[1]) as client:
    for _ in client.stream(token_ids=[1], max_tokens=int(sys.argv[2]), omit_text=True):
        pass
"""


class Merged:
    """A dispatcher whose every job gets its tokens so many at a time."""

    def __init__(self, per_message: int) -> None:
        self._per_message = per_message
        self.cpu_s = 0.0

    def models(self) -> Sequence[ServedModel]:
        """The one."""
        return [MODEL]

    def model(self, name: str) -> ServedModel:
        """The one."""
        return MODEL

    def end_choice(self, job: Job, choice: int) -> None:
        """Not here."""

    async def run(self, job: Job) -> AsyncGenerator[JobEvent, None]:
        """All tokens."""
        yield JobStarted()
        began_s, total = time.process_time(), job.stopping.max_tokens
        for first in range(0, total, self._per_message):
            yield JobTokens(0, first, tuple(range(self._per_message)))
            await asyncio.sleep(5e-4)  # Longer than a write takes: nothing waits behind another.
        self.cpu_s = time.process_time() - began_s
        yield ChoiceEnded(0, worker_pb2.END_REASON_LENGTH, total)
        yield JobFinished()


async def microseconds_a_token(per_message: int, tokens: int) -> float:
    """Runs one stream."""
    dispatcher = Merged(per_message)
    tokenizers = Tokenizers()
    server = grpc.aio.server(options=server_options())
    InferenceService(dispatcher, tokenizers).add_to_server(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READER, f"127.0.0.1:{port}", str(tokens)
    )
    assert await reader.wait() == 0
    await server.stop(None)
    tokenizers.close()
    return dispatcher.cpu_s / tokens * 1e6


def main() -> None:
    """Prints a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384)
    tokens = parser.parse_args().tokens
    for per_message in (1, 4, 16):
        cost_us = sorted(asyncio.run(microseconds_a_token(per_message, tokens)) for _ in range(3))[
            1
        ]
        print(f"{per_message:3d} tokens a message: {cost_us:6.1f} us of CPU a token")


if __name__ == "__main__":
    main()
