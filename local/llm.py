"""A model in this process: no server, no network.

    with LLM("./SmolLM2-135M-Instruct") as llm:
        print(llm.generate("The capital of France is", max_tokens=8).text)
        for answer in llm.generate(["One, two,", "Eins, zwei,"], temperature=0):
            print(answer.text)
        print(llm.chat([{"role": "user", "content": "Hello!"}]).text)

It is a worker's engine behind a router's front door. Requests, defaults, bounds, texts, results and
errors are those of `baton.client.Client`; settings are those of `baton worker`. Any thread may call
any method. Concurrent requests share one batch.

Life: the model is loaded, and then it generates. `close`, the end of the `with` block, or the end
of the main thread cancels running requests and ends the threads. The memory is freed once nothing
refers to the LLM. An LLM belongs to the process that made it: a fork can neither use nor end it.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import warnings
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar, Unpack, overload

from baton.client.generation import Gathering, Generation
from baton.client.options import Message, Options
from baton.client.pooling import (
    Embeddings,
    EmbedOptions,
    Input,
    ScoreOptions,
    Scores,
    embed_request,
    embeddings_of,
    score_request,
    scores_of,
)
from baton.client.requests import generation_request, tokenize_request
from baton.client.streams import GenerationStream
from baton.errors import BatonError
from baton.inference.v1 import inference_pb2 as pb
from local.llm_events import Events, typed_cancellation, typed_errors
from local.loop_thread import LoopThread
from local.opening import build, open_doors
from local.progress import bar
from local.vllm_flags import answer_setting
from router.batching.journal import Journal
from router.batching.lines import read_lines
from router.batching.running import LOWEST_PRIORITY, run
from router.call import Call
from serving.settings import SettingsError, resolve
from worker.settings import Role, WorkerSettings

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or the turns of a chat."""
T = TypeVar("T")
Q = TypeVar("Q")


class LLM:
    """Generates with one model on one device, for many prompts at once."""

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        """Loads the model, which takes a while. A terminal shows the progress.

        Args:
            model: folder, GGUF file or Hugging Face id; `demo` fetches a small one. None:
                `BATON_MODEL`, else `demo`.
            settings: fields of `worker.settings.WorkerSettings`. They beat `BATON_*`, which
                beats `baton.toml`. Those about serving, logs and spans mean nothing here. `debug`
                is a dict of rarely needed settings.

        Raises:
            SettingsError: a setting is unknown, or its value does not fit.
            DemoModelError: the demo model cannot be fetched.
            HubError: another model cannot be fetched.
            ModelError: the model cannot be read, or the engine does not support it.
            EngineError: the settings do not fit the model or the device.
            NoSlotError: `gpu_slots_dir` has no GPU left.
        """
        for name in settings.keys() - WorkerSettings.model_fields.keys():
            if instead := answer_setting(name):
                raise SettingsError(f"there is no setting `{name}` ({instead})")
        flags = {"model": model and os.fspath(model), **settings, "role": Role.BOTH}
        resolved = resolve(WorkerSettings, "worker", flags)
        for warning in resolved.warnings:
            warnings.warn(warning, DeprecationWarning, stacklevel=2)
        self.settings = resolved.settings
        with ExitStack() as stack:
            self.engine = build(self.settings, stack)
            """The engine. `load()` returns its stats; `model` describes the model."""
            self._loop = LoopThread("baton-llm")
            stack.callback(self._loop.stop)
            self._service, self._inside = self._loop.run(
                open_doors(self.engine, self.settings, stack)
            )
            stack.callback(self._loop.close)
            self._end = partial(_end, stack.pop_all(), os.getpid())
        self._dropped = weakref.finalize(self, _dropped, self._end)
        _OPEN.add(self)

    @overload
    def generate(  # type: ignore[overload-overlap]  # A str is a sequence of str, but one prompt.
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        *,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: str | Sequence[Prompt] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Generation | list[Generation]:
        """Generates for one prompt, or for many at once, and returns whole results.

        If one of many fails, the others are cancelled. A note on the error names the failed prompt.

        Args:
            prompt: raw text; or several prompts, each a text, token ids or chat turns; or
            messages: chat turns, rendered with the model's template; or
            token_ids: ids, used as they are.
            timeout_s: bounds the whole call. None: no bound.
            options: see `baton.client.options.Options`; the same for all prompts.

        Returns:
            The generation of one prompt, or a list for several, in their order.

        Raises:
            BatonError: a generation failed; `InvalidRequestError` says what is wrong with it.
            EngineError: with `tp`, a rank has ended; make a new LLM.
            ValueError, TypeError: not exactly one form of prompt was given, or an option is wrong.
            RuntimeError: the LLM is closed.
        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        if prompt is None or isinstance(prompt, str):
            request = _request(prompt, messages, token_ids, options)
            return self._run(self._generate(request, ends_s))
        if messages is not None or token_ids is not None:
            raise ValueError("give exactly one of prompt, messages and token_ids")
        is_one = isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable)
        prompts: Sequence[Any] = [prompt] if is_one else prompt  # One of a wrong type.
        requests = [_request(*_form(one), options) for one in prompts]
        with bar(len(requests)) as done:
            return self._run(self._generate_all(requests, ends_s, done))

    def beam_search(
        self,
        prompt: str | None = None,
        width: int = 4,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Searches for the likeliest outputs: `generate` with `beams` and `choices` of `width`.

        Returns:
            The hypotheses as choices, best first, each with its score.
        """
        chosen = Options(choices=width, beams=width)
        chosen.update(options)
        return self.generate(
            prompt, messages=messages, token_ids=token_ids, timeout_s=timeout_s, **chosen
        )

    def chat(
        self,
        messages: Sequence[Message],
        *,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Answers a conversation: `generate(messages=messages)`."""
        return self.generate(messages=messages, timeout_s=timeout_s, **options)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> GenerationStream:
        """Starts a generation for one prompt and returns its stream of deltas.

        Arguments and errors are those of `generate`. Leaving the stream's `with` block, or dropping
        the stream, cancels the generation.
        """
        request = generation_request(pb.StreamGenerateRequest, prompt, messages, token_ids, options)
        call = Call(time_left_s=timeout_s)
        events = Events(self._loop, self._service, request, call, self.engine, keeps=self)
        return GenerationStream(events, events.cancel, options.get("choices") or 1)

    def embed(
        self,
        inputs: str | Sequence[Input],
        *,
        timeout_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Returns a vector for each input, as `baton.client.Client.embed`."""
        request = embed_request(inputs, "", options)
        return embeddings_of(self._run(self._pooled(self._service.embed, request, timeout_s)))

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """Returns how relevant documents are to a query, as `baton.client.Client.score`."""
        request = score_request(query, documents, "", options)
        return scores_of(self._run(self._pooled(self._service.score, request, timeout_s)))

    def batch(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str] | Journal,
        *,
        at_once: int = 32,
        priority: int = LOWEST_PRIORITY,
        on_line: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Runs a file of requests in OpenAI's batch format, as `baton batch` does.

        Args:
            source: the requests.
            target: their results. Lines that have one are not run again.
            at_once: most requests under way at the same time.
            priority: of lines that set none; lower numbers run first, and others have 0.
            on_line: is called with each line that is done, and whether it went well.

        Raises:
            BatchError: the results are of another file, or another process writes them.
            OSError: a file cannot be read or written.
        """
        with ExitStack() as stack:
            held = target if isinstance(target, Journal) else Journal(Path(target))
            if held is not target:
                stack.enter_context(held)
            send = self._inside.send
            given = read_lines(Path(source)), held, send
            self._run(run(*given, at_once=at_once, priority=priority, on_line=on_line))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[int, ...]:
        """Returns the token ids of a text or of chat turns, as `baton.client.Client.tokenize`."""
        request = tokenize_request(text, messages, "", add_special_tokens)
        return tuple(self._run(self._tokenize(request)).token_ids)

    def close(self) -> None:
        """Cancels running requests and ends the engine. Further calls do nothing."""
        if self._dropped.detach() is not None:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits. An interrupted caller cancels it."""
        with typed_cancellation():
            return self._loop.run(work)

    async def _generate(self, request: pb.GenerateRequest, ends_s: float | None) -> Generation:
        left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
        call = Call(time_left_s=left_s, whole=True)
        with typed_errors(call, self.engine):
            response = await self._service.generate(request, call)
        return Gathering(request.input.choices or 1).add_whole(response)

    async def _generate_all(
        self,
        requests: Sequence[pb.GenerateRequest],
        ends_s: float | None,
        done: Callable[[Generation], None],
    ) -> list[Generation]:
        async def one(number: int, request: pb.GenerateRequest) -> Generation:
            try:
                generation = await self._generate(request, ends_s)
            except BatonError as error:
                error.add_note(f"prompt {number} of {len(requests)}, counted from 0")
                raise
            done(generation)
            return generation

        tasks = [asyncio.create_task(one(*each)) for each in enumerate(requests)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _pooled(
        self, method: Callable[[Q, Call], Awaitable[T]], request: Q, timeout_s: float | None
    ) -> T:
        call = Call(time_left_s=timeout_s)
        with typed_errors(call, self.engine):
            return await method(request, call)

    async def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        call = Call()
        with typed_errors(call, self.engine):
            return await self._service.tokenize(request, call)


def _end(held: ExitStack, process: int) -> None:
    """Ends an LLM in its own process. A fork has none of its threads and must release nothing."""
    if os.getpid() == process:
        held.close()


def _dropped(end: Callable[[], None]) -> None:
    """Ends an LLM that nothing refers to any more.

    The garbage collector may call this on any thread. One of Baton's own threads must not end the
    LLM here: it would wait for itself, or for a lock that it holds.
    """
    if threading.current_thread().name.startswith("baton-"):
        threading.Thread(target=end, name="baton-ending", daemon=True).start()
    else:
        end()


_OPEN: Final[weakref.WeakSet[LLM]] = weakref.WeakSet()
"""LLMs to close when the process ends."""


def _close_all() -> None:
    for llm in list(_OPEN):
        llm.close()


# Thread pools, also the engine's, register themselves here; later registrations run first. `atexit`
# itself would run too late.
getattr(threading, "_register_atexit", atexit.register)(_close_all)


def _request(
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    options: Options,
) -> pb.GenerateRequest:
    return generation_request(pb.GenerateRequest, prompt, messages, token_ids, options)


def _form(prompt: Any) -> tuple[str | None, Sequence[Message] | None, Sequence[int] | None]:
    """Sorts a prompt by its form: (text, messages, token ids), two of which are None."""
    if isinstance(prompt, str):
        return prompt, None, None
    if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__getitem__"):
        raise TypeError(
            f"a prompt is a text, token ids or chat turns, and not of type {type(prompt).__name__};"
            " of one prompt, ids are its token_ids and turns its messages"
        )
    is_chat = len(prompt) > 0 and isinstance(prompt[0], Mapping)
    return (None, prompt, None) if is_chat else (None, None, prompt)
