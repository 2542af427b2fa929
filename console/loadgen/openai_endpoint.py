"""An endpoint that sends token ids to `/v1/completions` of any server and reads its events.

`ignore_eos` and `min_tokens` force lengths, as vLLM, SGLang and Baton's own server understand them.
The time stamp of an event is that of the read that completed it.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterator
from typing import Any, Final

import aiohttp

from baton.tls import TlsFiles
from console.loadgen.endpoints import JSON, Asked, EndpointError, Kept, Reading, timed_out
from console.loadgen.outcome import UNREACHABLE

_READ_BUFFER_BYTES: Final = 1 << 20
"""A line of a stream with log probabilities may be long; aiohttp refuses lines beyond it."""
_MESSAGE_CHARACTERS: Final = 300
"""Characters of a server's error that are shown: enough to name the cause, too few to repeat a
prompt."""
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class OpenAiEndpoint:
    """The OpenAI API of a server, at a base URL that ends with `/v1`."""

    def __init__(self, base_url: str, asked: Asked) -> None:
        self._asked = asked
        self._url = f"{base_url}/completions"
        headers = {"content-type": "application/json"}
        if asked.api_key:
            headers["authorization"] = f"Bearer {asked.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=_context_of(asked.files)),
            timeout=aiohttp.ClientTimeout(total=asked.timeout_s),
            headers=headers,
            read_bufsize=_READ_BUFFER_BYTES,
        )

    def write(self, prompt: list[int], output_tokens: int) -> bytes:
        """Returns a request, serialized."""
        body: JSON = {
            "model": self._asked.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._asked.force_length:
            body |= {"ignore_eos": True, "min_tokens": output_tokens}
        if self._asked.ids:
            body["return_token_ids"] = True
        return json.dumps(body, separators=(",", ":")).encode()

    async def send(self, request: bytes, kept: Kept) -> None:
        """Sends a request and keeps its answer unread."""
        at_s, parts, now = kept.at_s, kept.parts, time.perf_counter
        try:
            async with self._session.post(self._url, data=request) as response:
                kept.trace_id = response.headers.get("x-request-id", "")
                if response.status != 200:
                    raise _refused(response.status, await response.text())
                async for part in response.content.iter_any():
                    at_s.append(now())
                    parts.append(part)
        except aiohttp.ClientConnectorError as error:
            raise EndpointError(UNREACHABLE, str(error)) from None
        except asyncio.TimeoutError:  # noqa: UP041 - aiohttp raises this name
            raise timed_out(self._asked.timeout_s) from None
        except aiohttp.ClientError as error:
            raise EndpointError("BROKEN_OFF", str(error)) from None

    def read(self, kept: Kept) -> Reading:
        """Reads an answer. Takes the token count from its usage, else counts one an event."""
        arrivals_s: list[float] = []
        ids: list[int] = []
        loaded: dict[str, int] = {}
        tokens, cached, done, failed = 0, 0, False, False
        for at_s, data in _events(kept):
            if data == _DONE:
                done = True
                continue
            try:
                event = json.loads(data)
            except ValueError:
                failed = True
                break
            failed |= "error" in event
            usage = event.get("usage") or {}
            tokens = usage.get("completion_tokens") or tokens
            details = usage.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or cached
            loaded = details.get("loaded_tokens") or loaded
            for choice in event.get("choices") or ():
                ids += choice.get("token_ids") or ()
            if any(map(_has_tokens, event.get("choices") or ())):
                arrivals_s.append(at_s)
        whole = done and not failed
        count = tokens or len(arrivals_s)
        return Reading(arrivals_s, count, kept.trace_id, whole, tuple(ids), cached, loaded)

    async def close(self) -> None:
        """Closes the connection."""
        await self._session.close()


def _context_of(files: TlsFiles) -> ssl.SSLContext | bool:
    return files.client_context() if any(files) else True


def _events(kept: Kept) -> Iterator[tuple[float, bytes]]:
    """Yields the arrival time and the data of each server-sent event."""
    rest = b""
    for at_s, part in zip(kept.at_s, kept.parts, strict=True):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                yield at_s, line[len(_DATA) :].strip()


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Whether an event brought tokens. A token may have no text yet; a bare end has no token."""
    return bool(choice.get("text")) or choice.get("finish_reason") is None


def _refused(status: int, body: str) -> EndpointError:
    try:
        error = json.loads(body)["error"]
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        message = body
    return EndpointError(f"HTTP {status}", message[:_MESSAGE_CHARACTERS])
