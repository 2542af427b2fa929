"""Commands to an admin port, as an operator sends them."""

from __future__ import annotations

import aiohttp


async def post_status(admin_address: str, authorization: str) -> int:
    """Of a POST to a page that takes none: 405 to operators, 403 to everybody else."""
    url, headers = f"http://{admin_address}/health/live", {"authorization": authorization}
    async with aiohttp.ClientSession() as session, session.post(url, headers=headers) as answer:
        return answer.status
