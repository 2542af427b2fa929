"""A client in a process of its own, to be killed: `python -m chaos.victim ADDRESS CA`.

It asks for long answers, says `reading` when each of them has begun, and reads for ever.
"""

from __future__ import annotations

import asyncio
import sys

from baton.client.clients import AsyncClient

STREAMS = 4
PROMPT = list(range(7, 107))


async def _read(client: AsyncClient, begun: asyncio.Semaphore) -> None:
    stream = client.stream(token_ids=PROMPT, max_tokens=1500, ignore_eos=True, temperature=0.0)
    async for _ in stream:
        begun.release()


async def main() -> None:
    begun = asyncio.Semaphore(0)
    client = AsyncClient(sys.argv[1], tls_ca=sys.argv[2])
    reading = [asyncio.create_task(_read(client, begun)) for _ in range(STREAMS)]
    await begun.acquire()
    print("reading", flush=True)
    await asyncio.gather(*reading, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
