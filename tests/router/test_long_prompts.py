"""Long prompts hold up nobody: not the event loop, not shorter prompts, and not for nothing."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import tokenizers
from frontdoor_kit import CORPUS, byte_fallback_tokenizer, byte_level_tokenizer, load
from scripted_worker import ScriptedWorker
from test_router_shutdown import Running, a_router_process
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from baton.inference.v1 import inference_pb2 as api
from router.folders.longest_token import longest_token_bytes
from router.requests.tokenization import PromptTooLongError, Tokenizer, Tokenizers

CONTEXT = 131_072
PACE_S = 0.005
LATE_S = 0.02
"""That the event loop may be; without letting go of the interpreter it was ten times as late."""
LOADED_S = 4.0
ROUNDS = 3
IN_TIME = 0.7  # 0 to 0.17 where the event loop encodes, 1 where the machine has nothing else to do
"""A machine that others use is late by itself at times: the best of these counts."""
PASSING = 20
"""So many normal prompts, one after the other, are answered before one of the largest is tokenized,
however fast the machine is: a normal one takes 20 ms where a largest one takes 6 s."""
TEXT_300_KB = "The quick brown fox jumps over the lazy dog. " * 6_666


def test_a_batch_of_one_gives_the_same_ids(folder: Path) -> None:
    tokenizer = load(folder)
    for text in [*CORPUS, "", "<|im_start|>user\n", "\ud800".encode(errors="replace").decode()]:
        assert tokenizer.encode(text).tolist() == tokenizer._backend.encode(text).ids


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_no_token_stands_for_more_text_than_the_longest(make: type) -> None:
    backend: tokenizers.Tokenizer = make()
    longest = longest_token_bytes(backend)
    assert longest is not None
    for token in backend.get_vocab():
        text = backend.decode([backend.token_to_id(token)], skip_special_tokens=False) * 50
        assert len(text.encode()) <= longest * len(backend.encode(text).ids)


def with_nfkc() -> tokenizers.Tokenizer:
    backend = byte_level_tokenizer()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC()])
    return backend


def test_what_makes_texts_shorter_counts() -> None:
    plain, shrinking = longest_token_bytes(byte_level_tokenizer()), longest_token_bytes(with_nfkc())
    assert plain is not None
    assert shrinking == 4 * plain
    text = "\N{MATHEMATICAL BOLD SMALL T}\N{MATHEMATICAL BOLD SMALL H}" * 50
    assert len(text.encode()) <= shrinking * len(with_nfkc().encode(text).ids)


def test_what_drops_text_has_no_bound() -> None:
    whitespace, stripping, swallowing = (byte_level_tokenizer() for _ in range(3))
    whitespace.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
    )
    stripping.normalizer = normalizers.Strip()
    swallowing.add_special_tokens([AddedToken("<|x|>", rstrip=True)])
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    for backend in (whitespace, stripping, swallowing, words):
        assert longest_token_bytes(backend) is None


@asynccontextmanager
async def busy(*pools: str) -> AsyncIterator[Tokenizers]:
    """Tokenizers whose threads are at work until the end of the block."""
    found, end = Tokenizers(threads=1), threading.Event()
    for pool in pools:
        getattr(found, pool).submit(end.wait)
    try:
        yield found
    finally:
        end.set()
        found.close()


async def test_a_text_that_cannot_fit_is_not_tokenized(folder: Path) -> None:
    tokenizer = load(folder)
    longest = longest_token_bytes(tokenizer._backend)
    assert longest is not None
    text = "ü" * (32 * longest + 1)
    chat = api.ChatPrompt(messages=[api.ChatMessage(role=api.ROLE_USER, content=text)])
    async with busy("_pool", "_long_pool") as found:
        with pytest.raises(PromptTooLongError) as caught:
            await found.encode(tokenizer, text, max_tokens=64)
    assert caught.value.least_tokens == 65
    assert len(tokenizer.encode(text)) >= 65
    found = Tokenizers()
    with pytest.raises(PromptTooLongError):
        await found.encode(tokenizer, chat, max_tokens=64)
    assert len((await found.encode(tokenizer, text))[0]) >= 65, "it is only counted"
    found.close()


async def test_a_long_text_is_not_waited_for(folder: Path) -> None:
    tokenizer = load(folder)
    async with busy("_long_pool") as found, asyncio.timeout(20):
        assert len((await found.encode(tokenizer, "word " * 1000))[0])
        long = asyncio.create_task(found.encode(tokenizer, "word " * 20_000))
        assert len((await found.encode(tokenizer, "word " * 1000))[0])
        assert not long.done()
    assert len(await asyncio.gather(long, return_exceptions=True)) == 1


async def test_what_waits_for_a_caller_who_left_is_not_begun(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, encoded = load(folder), list[int]()
    encode = Tokenizer.encode

    def watched(tokenizer: Tokenizer, text: str, *options: bool) -> object:
        encoded.append(len(text))
        return encode(tokenizer, text, *options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    found, end = Tokenizers(), threading.Event()
    found._long_pool.submit(end.wait)
    texts = ["word " * count for count in (20_000, 30_000, 40_000)]
    calls = [asyncio.create_task(found.encode(tokenizer, text)) for text in texts]
    await asyncio.sleep(0.05)
    for call in calls[:2]:
        call.cancel()
    await asyncio.wait(calls[:2])
    end.set()
    await asyncio.wait_for(calls[2], 20)
    assert encoded == [200_000]
    found.close()


async def answer(worker: ScriptedWorker) -> None:
    """Gives every request its one token, at a fixed pace."""
    while True:
        submit = await worker.heard("submit")
        await asyncio.sleep(PACE_S)
        worker.first_token(submit.attempt_id, 10)
        worker.finished(submit.attempt_id, 1)


@asynccontextmanager
async def a_served_router(folder: Path) -> AsyncIterator[Running]:
    model = {"path": str(folder), "max_context_tokens": CONTEXT, "vocab_size": 512}
    async with a_router_process(drain_s=0.0, **model) as router:
        router.worker.load.prefill_credit_tokens = CONTEXT
        router.worker.load.total_pages = router.worker.load.free_pages = CONTEXT
        answering = asyncio.create_task(answer(router.worker))
        try:
            yield router
        finally:
            answering.cancel()


async def generate(router: Running, text: str) -> float:
    """Seconds until the answer; whether it is good does not matter here."""
    prompt = api.GenerationInput(text=text, stop=api.StopOptions(max_tokens=1))
    began_s = time.perf_counter()
    with suppress(Exception):
        await router.stub.Generate(api.GenerateRequest(input=prompt), timeout=60)
    return time.perf_counter() - began_s


def lags(router: Running) -> tuple[float, float]:
    """How often the router's event loop woke up, and how often no later than `LATE_S`."""
    with urllib.request.urlopen(f"http://{router.admin}/metrics", timeout=20) as page:
        text = page.read().decode()
    buckets = {
        edge: float(count)
        for edge, count in re.findall(r'event_loop_lag_seconds_bucket{le="(.+)"} (.+)', text)
    }
    return buckets["+Inf"], buckets[str(LATE_S)]


@pytest.mark.timeout(180)
async def test_long_prompts_hold_up_neither_the_event_loop_nor_a_normal_one(folder: Path) -> None:
    longest = longest_token_bytes(load(folder)._backend)
    assert longest is not None
    largest = ("fox jumps over " * CONTEXT)[: CONTEXT * longest - 1]
    normal = "word " * 600
    shares = []
    async with a_served_router(folder) as router:
        assert await generate(router, normal) < 20
        for _ in range(ROUNDS):
            end_s = time.monotonic() + LOADED_S
            woken, in_time = await asyncio.to_thread(lags, router)
            while time.monotonic() < end_s:
                await generate(router, TEXT_300_KB)
            now = await asyncio.to_thread(lags, router)
            shares.append((now[1] - in_time) / (now[0] - woken))
            if shares[-1] >= IN_TIME:
                break
        others = [asyncio.create_task(generate(router, largest)) for _ in range(4)]
        await asyncio.sleep(0.2)
        took = [await generate(router, normal) for _ in range(PASSING)]
        print(json.dumps({"in time": shares, "normal": took}))
        assert not all(one.done() for one in others), (
            "they came before, and would be answered first"
        )
        for one in others:
            one.cancel()
    assert max(shares) >= IN_TIME


async def test_many_short_prompts_do_not_hold_up_the_event_loop(folder: Path) -> None:
    """So many characters are encoded directly in one turn of the loop; threads have the rest."""
    tokenizer, text = load(folder), "a b " * 256
    async with busy("_pool") as found, asyncio.timeout(20):
        calls = [asyncio.create_task(found.encode(tokenizer, text)) for _ in range(64)]
        await asyncio.sleep(0.01)
        assert [call.done() for call in calls] == [True, True] + [False] * 62
        assert len((await found.encode(tokenizer, text))[0]), "it is another turn"
        for call in calls:
            call.cancel()


async def test_who_has_many_texts_keeps_nobody_waiting(folder: Path) -> None:
    tokenizer, ended = load(folder), list[str]()

    async def encode(sharer: str) -> None:
        await found.encode(tokenizer, "word " * 1000, sharer=sharer)
        ended.append(sharer)

    found, end = Tokenizers(threads=1), threading.Event()
    found._pool.submit(end.wait)
    calls = [asyncio.create_task(encode(sharer)) for sharer in "a" * 9 + "b"]
    await asyncio.sleep(0.01)
    end.set()
    await asyncio.wait(calls, timeout=20)
    found.close()
    assert ended.index("b") <= 2
