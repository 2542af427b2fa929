"""A model in this process: no server, no network.

    with LLM("./SmolLM2-135M-Instruct") as llm:
        print(llm.generate("The capital of France is", max_tokens=8).text)
        for answer in llm.generate(["One, two,", "Eins, zwei,"], temperature=0):
            print(answer.text)
        print(llm.chat([{"role": "user", "content": "Hello!"}]).text)

It is a worker's engine behind a router's front door: requests, defaults, bounds, texts, results and
errors are those of `baton.client.Client`, and settings those of `baton worker`. Any thread may call
any method; what runs at the same time shares one batch.

Life: the model is loaded -> it generates -> `close`, the end of the `with` block or of the main
thread: what runs is cancelled, the threads end, and the memory is free once nobody names the LLM.
It belongs to the process that made it: a fork cannot use it, and ends nothing of it.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, Self, TypeVar, Unpack, overload

import torch

from baton import demo_model
from baton.client import LONGEST_S
from baton.commands.output import model_progress
from baton.engine_dispatcher import EngineDispatcher
from baton.errors import BatonError
from baton.generation import Gathering, Generation, Message, Options
from baton.gpu_slots import claimed_for
from baton.inference.v1 import inference_pb2 as pb
from baton.llm_events import Events, typed_cancellation, typed_errors
from baton.loop_thread import LoopThread
from baton.requests import generation_request, tokenize_request
from baton.settings import resolve
from baton.streams import GenerationStream
from baton.worker_engine import engine_config
from baton.worker_loading import loading_progress, terminal
from baton.worker_settings import Role, WorkerSettings
from engine.engine import Engine
from router.calls import Call
from router.frontdoor import InferenceService
from router.tokenization import Tokenizers
from router.validation import Limits

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or the turns of a chat."""
T = TypeVar("T")


class LLM:
    """Generates with one model on one device, for many prompts at once."""

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        """Loads the model, which takes a while; a terminal shows how far it is.

        Args:
            model: folder, GGUF file or Hugging Face id; `demo` fetches a small one. None: as
                `BATON_MODEL` says, else `demo`.
            settings: fields of `baton.worker_settings.WorkerSettings`. They beat `BATON_*`, which
                beats `baton.toml`. Those about serving, logs and spans mean nothing here. `debug`
                is a dict of rarely needed settings.

        Raises:
            SettingsError: a setting is unknown, or its value does not fit.
            DemoModelError: the demo model cannot be fetched.
            ModelError: the model cannot be read, or is none that the engine computes.
            EngineError: the settings do not fit the model or the device.
            NoSlotError: `gpu_slots_dir` has no GPU left.
        """
        flags = {"model": model and os.fspath(model), **settings, "role": Role.BOTH}
        self.settings = resolve(WorkerSettings, "worker", flags).settings
        with ExitStack() as stack:
            self.engine = _build(self.settings, stack)
            """What it runs on; `load()` has its figures, `model` the model's."""
            self._loop = LoopThread("baton-llm")
            stack.callback(self._loop.stop)
            self._service = self._loop.run(_open(self.engine, self.settings, stack))
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

        The first of many that fails ends the others; a note on its error says which it was.

        Args:
            prompt: raw text; or several prompts, each a text, token ids or chat turns; or
            messages: chat turns, rendered with the model's template; or
            token_ids: ids, used as they are.
            timeout_s: bounds the whole call. None: nothing does.
            options: see `baton.generation.Options`; the same for all prompts.

        Returns:
            For one prompt its generation; for several a list, in their order.

        Raises:
            BatonError: it failed; `InvalidRequestError` says what is wrong with the request.
            ValueError, TypeError: not exactly one form of prompt, or no such option.
            RuntimeError: it is closed.
        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        if prompt is None or isinstance(prompt, str):
            request = _request(prompt, messages, token_ids, options)
            return self._run(self._generate(request, ends_s))
        if messages is not None or token_ids is not None:
            raise ValueError("give exactly one of prompt, messages and token_ids")
        prompts: Sequence[Any] = [prompt] if isinstance(prompt, Mapping) else prompt
        requests = [_request(*_form(one), options) for one in prompts]
        with _bar(len(requests)) as done:
            return self._run(self._generate_all(requests, ends_s, done))

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
        """Generates for one prompt and returns the deltas as they come. Arguments and errors as
        `generate`; leaving the stream's `with` block, or dropping it, cancels."""
        request = generation_request(pb.StreamGenerateRequest, prompt, messages, token_ids, options)
        call = Call(time_left_s=timeout_s)
        events = Events(self._loop, self._service, request, call, keeps=self)
        return GenerationStream(events, events.cancel, options.get("choices", 1))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[int, ...]:
        """The token ids of a text, or of chat turns, as `baton.client.Client.tokenize`."""
        request = tokenize_request(text, messages, "", add_special_tokens)
        return tuple(self._run(self._tokenize(request)).token_ids)

    def close(self) -> None:
        """Cancels what runs and ends the engine. Once is enough."""
        if self._dropped.detach() is not None:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for work on the loop; an interrupted caller cancels it."""
        with typed_cancellation():
            return self._loop.run(work)

    async def _generate(self, request: pb.GenerateRequest, ends_s: float | None) -> Generation:
        left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
        call = Call(time_left_s=left_s, whole=True)
        with typed_errors(call):
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

    async def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        call = Call()
        with typed_errors(call):
            return await self._service.tokenize(request, call)


def _end(held: ExitStack, process: int) -> None:
    """A fork has no thread of these, and what they hold is not its own."""
    if os.getpid() == process:
        held.close()


def _dropped(end: Callable[[], None]) -> None:
    """Nobody names an LLM any more. A garbage collection finds that out on any thread, which may be
    one that would wait for itself here, or for a lock that it holds."""
    if threading.current_thread().name.startswith("baton-"):
        threading.Thread(target=end, name="baton-ending", daemon=True).start()
    else:
        end()


_OPEN: Final[weakref.WeakSet[LLM]] = weakref.WeakSet()
"""To be closed when the process ends."""


def _close_all() -> None:
    for llm in list(_OPEN):
        llm.close()


# As thread pools do, the engine's among them, and before them: `atexit` itself would be too late.
getattr(threading, "_register_atexit", atexit.register)(_close_all)


def _build(settings: WorkerSettings, stack: ExitStack) -> Engine:
    """The engine, not started; what must outlive it goes onto the stack."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    with model_progress() as fetching:
        folder = demo_model.resolve(settings.model, fetching)
    stack.enter_context(claimed_for(settings.device, settings.gpu_slots_dir, settings.name))
    with loading_progress(terminal(settings.log_format)) as loading:
        found = settings.model_copy(update={"model": folder})
        return Engine.build(engine_config(found), loading)


async def _open(engine: Engine, settings: WorkerSettings, stack: ExitStack) -> InferenceService:
    """Starts the engine; what it hears belongs to the running loop."""
    tokenizers = Tokenizers()
    stack.callback(tokenizers.close)
    dispatcher = EngineDispatcher(engine, settings.max_sequences)
    dispatcher.start()
    stack.callback(engine.stop)
    if settings.debug.profile:
        engine.profile(settings.debug.profile, settings.debug.profile_dir)
    await tokenizers.warm([engine.model.path])
    limits = Limits(
        max_choices=min(Limits().max_choices, settings.max_sequences),
        max_request_duration_s=LONGEST_S,
        max_unread_tokens=sys.maxsize,
    )
    return InferenceService(dispatcher, tokenizers, limits)


def _request(
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    options: Options,
) -> pb.GenerateRequest:
    return generation_request(pb.GenerateRequest, prompt, messages, token_ids, options)


def _form(prompt: Any) -> tuple[str | None, Sequence[Message] | None, Sequence[int] | None]:
    """One of several prompts, in the place where `generate` has its form."""
    if isinstance(prompt, str):
        return prompt, None, None
    if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__getitem__"):
        raise TypeError(
            f"a prompt is a text, token ids or chat turns, and not of type {type(prompt).__name__};"
            " of one prompt, ids are its token_ids and turns its messages"
        )
    is_chat = len(prompt) > 0 and isinstance(prompt[0], Mapping)
    return (None, prompt, None) if is_chat else (None, None, prompt)


@contextmanager
def _bar(prompts: int) -> Iterator[Callable[[Generation], None]]:
    """How far many prompts are, drawn on a terminal; yields what hears of each that is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = terminal("text")
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.fields[rate]}")
    began_s, tokens = time.monotonic(), 0
    with Progress(*columns, console=console, transient=True, disable=console is None) as bar:
        task = bar.add_task("", total=prompts, rate="")

        def done(generation: Generation) -> None:
            nonlocal tokens
            tokens += generation.usage.output_tokens
            rate = tokens / (time.monotonic() - began_s)
            bar.update(task, advance=1, rate=f"{rate:,.0f} tokens/s")

        yield done
