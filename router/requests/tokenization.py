"""Turns text into token ids: the tokenizer and chat template of a served model.

This module uses only `tokenizers` and `jinja2` (`router.requests.chat_template`).
`transformers.AutoTokenizer` reads the same files through the same Rust library. But its import
takes seconds and loads torch if torch is installed, and a router must not hold torch.

A model folder is read once, before the first request for it if it was warmed. Batches, even of
one, are encoded and decoded without the GIL. They run on a small pool, and long ones on a thread of
their own, so that a prompt of a megabyte delays neither streams nor shorter prompts. Waiting work
is not begun if its caller has left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import tokenizers
from numpy.typing import NDArray

from baton.inference.v1 import inference_pb2 as api
from baton.worker.v1 import worker_pb2
from prefixes.keys import NO_KEYS, ShortKeys, page_keys, prompt_short_keys, salt_of, short_keys
from router import errors
from router.answers.families import form_of
from router.answers.forms import ResponseForm
from router.answers.parser import is_readable
from router.answers.token_texts import TokenTexts
from router.aside.turns import Turns
from router.folders.classes import TokenizerError
from router.folders.longest_token import longest_token_bytes
from router.folders.templates import DEFAULT, Templates, template_sources
from router.folders.tokenizer import FILE, read_tokenizer
from router.requests.chat_template import render
from router.requests.rendering import Model, Renderers, TokenizerCrashError
from router.structure.plan import AnswerPlans

if TYPE_CHECKING:
    from router.jobs import Job, ServedModel

logger = logging.getLogger(__name__)

PromptIds = NDArray[np.uint32]
Result = TypeVar("Result")

_INLINE_CHARS: Final = 2048
"""Texts up to this length are encoded directly, since a thread switch would take longer. It is also
the most that is encoded directly in one turn of the event loop: a request may have many prompts."""
_SHARING_CHARS: Final = 1024
"""Longer texts are encoded in a callback of their own. 2,048 characters take 0.48 ms, and what a
request takes before and behind them 0.25: a loop that runs 0.5 ms at a stretch delays tokens."""
_IDS_A_TURN: Final = 4096
"""Keys of so many ids are made in one callback, which takes 0.2 ms."""
_IDS_A_CHAR: Final = 8
"""So many ids take as long to hash as a character to encode, at most."""
_LONG_CHARS: Final = 65_536
"""Longer texts take some hundredths of a second. They share one thread."""
_LONG_IDS: Final = 16_384
"""Bound of ids that are decoded, or whose keys are made. Keys of fewer are made directly:
those of 8,000 take 0.4 ms. A thread would hold the interpreter as long, and took 1.1 ms (medians
on two busy cores; 18 and 0.44 ms were the ninetieth percentiles)."""


class PromptTooLongError(Exception):
    """The number of bytes shows that the text cannot fit."""

    def __init__(self, least_tokens: int, max_tokens: int) -> None:
        super().__init__(f"at least {least_tokens} tokens, and room for {max_tokens}")
        self.least_tokens = least_tokens
        self.max_tokens = max_tokens


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        templates: Templates | None = None,
        special_tokens: Mapping[str, str] | None = None,
        form: ResponseForm | None = None,
        texts: TokenTexts | None = None,
    ) -> None:
        self._backend = backend
        self.texts = texts
        """Text of each token; None if it depends on what stands around it, or is not known."""
        self._templates = templates or Templates({})
        self.template_source = self._templates.sources.get(DEFAULT)
        """Source of the chat template."""
        self.template_names = self._templates.names
        """Variables that chat templates read."""
        self.form = form or ResponseForm()
        """The form of the model's answers."""
        self.special_tokens = dict(special_tokens or {})
        """Texts of special tokens by name, such as `eos_token`."""
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        """Ids that have no text."""
        self.special_token_ids = {
            token: token_id
            for token_id in self.special_ids
            if (token := backend.id_to_token(token_id)) is not None
        }
        """Ids of special tokens by their texts."""
        self._longest_token_bytes = longest_token_bytes(backend)
        self.rendered_with = Model(
            tuple(self._templates.sources.items()), tuple(self.special_tokens.items())
        )
        """What conversations are rendered with."""

    @classmethod
    def load(cls, folder: str, chat_template: str | None = None) -> Tokenizer | None:
        """Reads a model folder. None if it has no `tokenizer.json`, or is ""; such a model takes
        and gives ids. `chat_template` is the source of one that replaces the model's own.

        Raises:
            TokenizerError: transformers would read the folder otherwise, or not at all.
        """
        path = Path(folder)
        if not folder or not (path / FILE).is_file():
            return None
        backend, special, config = read_tokenizer(path)
        sources = {DEFAULT: chat_template} if chat_template is not None else None
        templates = Templates(template_sources(path, config) if sources is None else sources)
        source = templates.text
        form = form_of(config, source)
        if form.spec is not None and not form.is_harmony and not is_readable(form.spec):
            form = form_of({}, source)
        return cls(backend, templates, special, form, TokenTexts.of(backend))

    def encode(self, text: str, add_special_tokens: bool = True) -> PromptIds:
        """Ids of a raw text, with the special tokens that the model expects around it."""
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return _ids(batch[0])

    def encode_pair(self, first: str, second: str) -> PromptIds:
        """Ids of two texts, joined as the model expects a pair."""
        return _ids(self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)[0])

    def check_length(self, text: str, max_tokens: int) -> None:
        """Checks by its bytes that a text can have at most `max_tokens` tokens.

        Raises:
            PromptTooLongError: it certainly has more.
        """
        if (longest := self._longest_token_bytes) is None or len(text) * 4 <= max_tokens * longest:
            return
        least_tokens = -(-len(text.encode(errors="surrogatepass")) // longest)
        if least_tokens > max_tokens:
            raise PromptTooLongError(least_tokens, max_tokens)

    def render_chat(self, chat: api.ChatPrompt) -> str:
        """Text of a conversation, up to the point at which the assistant begins or goes on.

        Raises:
            ChatTemplateError: there is no template, or it refuses these turns.
        """
        return render(self._templates, self.special_tokens, chat)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Special tokens are skipped or written by name. Half characters are
        U+FFFD."""
        batch = [token_ids]
        return self._backend.decode_batch(batch, skip_special_tokens=skip_special_tokens)[0]

    def ids_within(self, texts: Iterable[str]) -> frozenset[int]:
        """The special tokens whose names stand in one of the texts."""
        whole = "\n".join(texts)
        named = self.special_token_ids.items()
        return frozenset(token_id for name, token_id in named if name and name in whole)

    def token_text(self, token_id: int) -> str:
        """Text of one token as it is inside a text; the name of a special token."""
        if token_id in self.special_ids:
            return self._backend.id_to_token(token_id) or ""
        # A decoder may treat a text's first token specially, so take the part that the second adds.
        alone, twice = self.decode([token_id]), self.decode([token_id, token_id])
        return twice[len(alone) :]


class Tokenizers:
    """Tokenizers by model folder, and the threads that run them. Belongs to the event loop."""

    def __init__(self, threads: int = 2, chat_template: str | None = None) -> None:
        self._chat_template = chat_template
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="baton-tokenize")
        self._long_pool = ThreadPoolExecutor(1, thread_name_prefix="baton-tokenize-long")
        self._loads: dict[str, asyncio.Future[Tokenizer | None]] = {}
        self._turns, self._long_turns = Turns(threads), Turns(1)
        self._done_directly = 0
        """Characters in this turn of the event loop."""
        self._renderers = Renderers()
        self.plans = AnswerPlans()
        """Plans of answers, which need tokenizers and threads as well."""

    async def get(self, folder: str) -> Tokenizer | None:
        """The tokenizer of a model folder, read at most once unless reading it fails.

        Raises:
            RouterError: TOKENIZER_UNSUPPORTED.
        """
        load = self._loads.get(folder)
        if load is None or (load.done() and (load.cancelled() or load.exception())):
            load = self._loads[folder] = asyncio.create_task(self._load(folder))
        # Shielded: a caller that gives up must not cancel the load for other waiting callers.
        try:
            return await asyncio.shield(load)
        except TokenizerError as error:
            logger.error(
                "the tokenizer cannot be used", extra={"folder": folder, "why": str(error)}
            )
            raise errors.tokenizer_unsupported(str(error)) from None

    async def _load(self, folder: str) -> Tokenizer | None:
        if folder and (Path(folder) / FILE).is_file():
            try:
                await self._renderers.check_tokenizer(folder)
            except TokenizerCrashError:
                why = "to read it crashes, or takes too long or too much memory"
                raise TokenizerError(why) from None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, Tokenizer.load, folder, self._chat_template)

    async def warm(self, models: Iterable[ServedModel]) -> None:
        """Reads the tokenizers that were not read yet. What checks forms of answers gets ready
        meanwhile and is not waited for. Errors are left to the requests that need them."""
        models = list(models)
        found = await asyncio.gather(*(self.get(m.path) for m in models), return_exceptions=True)
        for model, tokenizer in zip(models, found, strict=True):
            if isinstance(tokenizer, Tokenizer):
                self.plans.grammars.warm(model)

    async def encode(
        self,
        tokenizer: Tokenizer,
        prompt: str | api.ChatPrompt,
        add_special_tokens: bool | None = None,
        max_tokens: int | None = None,
        sharer: str = "",
    ) -> tuple[PromptIds, str]:
        """Ids of a text or a conversation, and the text of which they are made. All but short ones
        are encoded on threads.

        Args:
            tokenizer: the tokenizer of the model.
            prompt: the text or conversation.
            add_special_tokens: None as in a generation: yes for a text, no for a conversation.
            max_tokens: a prompt that certainly has more need not be encoded; None sets no bound.
            sharer: takes turns at the threads with others.

        Raises:
            ChatTemplateError: the conversation cannot be rendered.
            PromptTooLongError: the prompt's bytes show that it has more than `max_tokens`.
        """
        if add_special_tokens is None:
            add_special_tokens = isinstance(prompt, str)
        if isinstance(prompt, str):
            text = prompt
        else:
            text = await self._renderers.render(tokenizer.rendered_with, prompt, sharer)
        if max_tokens is not None:
            tokenizer.check_length(text, max_tokens)
        work = partial(tokenizer.encode, text, add_special_tokens)
        if await self._may_do_directly(len(text)):
            return work(), text
        is_long = len(text) > _LONG_CHARS
        return await self._run(work, sharer, is_long=is_long), text

    async def encode_pair(
        self, tokenizer: Tokenizer, pair: tuple[str, str], max_tokens: int | None, sharer: str
    ) -> PromptIds:
        """Ids of two texts as a pair. Arguments and errors are as in `encode`."""
        if max_tokens is not None:
            tokenizer.check_length("".join(pair), max_tokens)
        work, chars = partial(tokenizer.encode_pair, *pair), sum(map(len, pair))
        if await self._may_do_directly(chars):
            return work()
        return await self._run(work, sharer, is_long=chars > _LONG_CHARS)

    async def words(
        self, tokenizer: Tokenizer | None, words: Sequence[str], vocab_size: int, sharer: str
    ) -> list[bytes]:
        """The runs of ids of the model, packed, that write one of the words."""
        if not words:
            return []
        assert tokenizer is not None, "validation made sure"
        work = partial(_word_ids, tokenizer, words, vocab_size)
        if self._is_done_directly(2 * sum(map(len, words))):
            return work()
        return await self._run(work, sharer, is_long=False)

    async def texts(
        self, tokenizer: Tokenizer, token_ids: Sequence[int], sharer: str = ""
    ) -> list[str]:
        """Text of each token, by `Tokenizer.token_text` on the pool."""
        work = partial(_texts, tokenizer, token_ids)
        return await self._run(work, sharer, is_long=len(token_ids) > _LONG_IDS)

    async def decode(
        self,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        sharer: str = "",
    ) -> str:
        """Text of ids, by `Tokenizer.decode` on the pool."""
        work = partial(tokenizer.decode, token_ids, skip_special_tokens)
        return await self._run(work, sharer, is_long=len(token_ids) > _LONG_IDS)

    async def page_keys(self, job: Job) -> ShortKeys:
        """Keys of a job's prompt, which fits the context: so this is bounded, too. None where a
        worker may find no pages. Long prompts are hashed on a thread."""
        model = job.model
        means = job.pooling is not None and job.pooling.kind != worker_pb2.POOL_KIND_LAST
        if job.prompt_logprobs or means or not model.prefix_cache:
            return NO_KEYS
        shape = model.page_size_tokens, model.kv_precision, job.cache_salt, model.digest
        if self._is_done_directly(job.prompt_tokens // _IDS_A_CHAR):
            return await _keys_in_turns(job.prompt_ids, shape[0], salt_of(*shape[1:]))
        work = partial(prompt_short_keys, job.prompt_ids, *shape)
        return await self._run(work, job.turn, is_long=job.prompt_tokens > _LONG_IDS)

    def close(self) -> None:
        """Ends the threads after their current work."""
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self._renderers.close()
        self.plans.close()

    async def _may_do_directly(self, chars: int) -> bool:
        """Whether a text of so many characters may be encoded on the event loop now; then it is."""
        if _SHARING_CHARS < chars <= _INLINE_CHARS:
            await asyncio.sleep(0)
        return self._is_done_directly(chars)

    def _is_done_directly(self, chars: int) -> bool:
        """Whether work on so many characters may be done on the event loop now; then it is."""
        if self._done_directly + chars > _INLINE_CHARS:
            return False
        if not self._done_directly:
            asyncio.get_running_loop().call_soon(self._new_turn)
        self._done_directly += chars
        return True

    def _new_turn(self) -> None:
        self._done_directly = 0

    async def _run(self, work: Callable[[], Result], sharer: str, *, is_long: bool) -> Result:
        """Runs work on a thread, where sharers take turns, and returns its result. Work that is
        cancelled before it begins is not run."""
        turns, pool = self._turns, self._pool
        if is_long:
            turns, pool = self._long_turns, self._long_pool
        async with turns.turn(sharer):
            return await asyncio.get_running_loop().run_in_executor(pool, work)


async def _keys_in_turns(ids: PromptIds, page_size: int, salt: bytes) -> ShortKeys:
    """`prompt_short_keys`, in several callbacks of the event loop."""
    keys: list[bytes] = []
    for end in range(_IDS_A_TURN, len(ids) - 1, _IDS_A_TURN):
        keys = page_keys(ids[:end], page_size, salt, keys)
        await asyncio.sleep(0)
    return short_keys(page_keys(ids[:-1], page_size, salt, keys))


def _word_ids(tokenizer: Tokenizer, words: Iterable[str], vocab_size: int) -> list[bytes]:
    found: list[bytes] = []
    for word in words:
        # A word has other tokens at the start of a text, or within a word, than after a space.
        ids = (tokenizer.encode(text, False) for text in (word, f" {word}"))
        runs = {one.astype("<u4").tobytes() for one in ids if (one < vocab_size).all()}
        found += sorted(run for run in runs if run)
    return found


def _texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    texts = {token_id: tokenizer.token_text(token_id) for token_id in set(token_ids)}
    return [texts[token_id] for token_id in token_ids]


def _ids(encoding: tokenizers.Encoding) -> PromptIds:
    return np.asarray(encoding.ids, dtype=np.uint32)
