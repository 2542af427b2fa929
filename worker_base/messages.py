"""Converts between the internal protocol's messages and the records of engine and transfer thread.

Both services use this module. It holds no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from baton.worker.v1 import worker_pb2
from engine.adapters.types import DIGEST_BYTES
from engine.beams.params import BeamParams, EarlyStopping
from engine.types import (
    EndReason,
    FailureReason,
    Mode,
    ModelInfo,
    NewTokens,
    PageIds,
    PeerFetch,
    Request,
    SamplingParams,
    StopRules,
    ThinkingBudget,
    TokenIds,
    TokenRecord,
)
from kv_transfer import wire
from kv_transfer.types import SCRATCH_PAGE, Endpoint, PageGroup
from serving.wire import MAX_EXTENSION_BYTES, MAX_EXTENSIONS, PACKED_ID, extension_bytes, pack_ids
from worker_base.pooling import defaults_message, pooling_of

MAX_PAYLOAD_BYTES: Final = 3584
"""Most bytes of first-token records in the last notification of a transfer."""
LARGEST_ID: Final = (1 << 31) - 1
"""The engine's ids are int32."""
_PACKED_LOGPROB: Final = np.dtype("<f4")

_MODES: Final = {
    worker_pb2.WORK_MODE_WHOLE: Mode.WHOLE,
    worker_pb2.WORK_MODE_PREFILL: Mode.PREFILL,
    worker_pb2.WORK_MODE_DECODE: Mode.RECEIVE,
    worker_pb2.WORK_MODE_POOL: Mode.POOL,
}
_EARLY_STOPPING: Final[Mapping[int, EarlyStopping]] = {
    worker_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.NO_BETTER,
    worker_pb2.EARLY_STOPPING_AT_ONCE: EarlyStopping.AT_ONCE,
    worker_pb2.EARLY_STOPPING_NEVER_BETTER: EarlyStopping.NEVER_BETTER,
}
_END_REASONS: Final = {
    EndReason.END_OF_SEQUENCE: worker_pb2.END_REASON_END_OF_SEQUENCE,
    EndReason.STOP_TOKEN: worker_pb2.END_REASON_STOP_TOKEN,
    EndReason.LENGTH: worker_pb2.END_REASON_LENGTH,
}
_FAILURE_REASONS: Final = {
    reason: worker_pb2.FailureReason.Value(f"FAILURE_REASON_{reason.name}")
    for reason in FailureReason
}


class MalformedMessage(ValueError):  # noqa: N818 - it names the thing refused
    """A message holds values that no sender of this version makes. It never carries the content."""


def unpack_ids(packed: bytes) -> TokenIds | PageIds:
    """Unpacks ids from little-endian uint32.

    Raises:
        MalformedMessage: it is not a whole number of ids, or one is beyond int32.
    """
    if len(packed) % PACKED_ID.itemsize:
        raise MalformedMessage("ids")
    ids = np.frombuffer(packed, PACKED_ID)
    if ids.size and int(ids.max()) > LARGEST_ID:
        raise MalformedMessage("ids")
    return ids.astype(np.int32)


def request_of(submit: worker_pb2.Submit) -> Request:
    """Makes the engine's request for a Submit. The attempt's id becomes the request's.

    Raises:
        MalformedMessage: the prompt or the id is empty, there is no choice, the mode is unknown,
            ids are malformed, the output so far does not fit the choices or leaves nothing to
            generate, beams do not fit them, extensions exceed their bounds, or the adapter's
            digest is none.
    """
    mode = _MODES.get(submit.mode)
    prompt_ids = unpack_ids(submit.prompt_ids)
    generated = tuple(unpack_ids(tokens.token_ids) for tokens in submit.generated)
    if mode is None or not prompt_ids.size or submit.choices < 1 or not submit.attempt_id:
        raise MalformedMessage("submit")
    beams = submit.HasField("beams")
    if generated and (len(generated) != submit.choices or beams or mode is Mode.POOL):
        raise MalformedMessage("generated")
    if any(len(tokens) >= submit.stopping.max_tokens for tokens in generated):
        raise MalformedMessage("generated")
    if len(submit.adapter) not in (0, DIGEST_BYTES):
        raise MalformedMessage("adapter")
    extensions = dict(submit.extensions)
    if len(extensions) > MAX_EXTENSIONS or extension_bytes(extensions) > MAX_EXTENSION_BYTES:
        raise MalformedMessage("extensions")
    return Request(
        id=submit.attempt_id,
        prompt_ids=prompt_ids,
        sampling=_sampling_of(submit.sampling),
        stop=StopRules(
            max_tokens=submit.stopping.max_tokens,
            min_tokens=submit.stopping.min_tokens,
            token_ids=frozenset(submit.stopping.token_ids),
            ignore_eos=submit.stopping.ignore_eos,
        ),
        mode=mode,
        choices=submit.choices,
        first_choice=submit.first_choice,
        generated=generated,
        priority=submit.priority,
        tenant=submit.tenant,
        cache_salt=submit.cache_salt,
        adapter=submit.adapter,
        prompt_logprobs=submit.prompt_logprobs,
        takeover_tokens=submit.takeover_tokens,
        extensions=extensions,
        speculates=not submit.no_speculation,
        fetch=_fetch_of(submit),
        beams=_beams_of(submit, mode) if submit.HasField("beams") else None,
        pooling=pooling_of(submit.pooling) if mode is Mode.POOL else None,
    )


def _beams_of(submit: worker_pb2.Submit, mode: Mode) -> BeamParams:
    beams, early = submit.beams, _EARLY_STOPPING.get(submit.beams.early_stopping)
    if early is None or submit.choices != (1 if mode is Mode.PREFILL else beams.width):
        raise MalformedMessage("beams")
    return BeamParams(beams.width, beams.length_penalty, early)


def _fetch_of(submit: worker_pb2.Submit) -> PeerFetch | None:
    fetch = submit.fetch
    if not fetch.agent_name or not fetch.pages:
        return None
    return PeerFetch(fetch.agent_name, fetch.pages)


def kv_tokens(request: Request) -> int:
    """Tokens whose KV a hand-off moves: the prompt, and the earlier output of a resumed choice."""
    return len(request.prompt_ids) + resumed_tokens(request, 0)


def resumed_tokens(request: Request, choice: int) -> int:
    """Output tokens that the choice had before this attempt, hence the index of its next one."""
    return len(request.generated[choice]) if choice < len(request.generated) else 0


def pages_of(num_tokens: int, page_size_tokens: int) -> int:
    """Pages that `num_tokens` tokens take."""
    return -(-num_tokens // page_size_tokens)


def record_message(record: TokenRecord) -> worker_pb2.TokenRecord:
    """Makes the message of a token record."""
    return worker_pb2.TokenRecord(
        token_id=record.token_id,
        logprob=record.logprob,
        top_ids=pack_ids(record.top_ids),
        top_logprobs=np.asarray(record.top_logprobs, _PACKED_LOGPROB).tobytes(),
    )


def scores_message(attempt_id: bytes, records: Sequence[TokenRecord]) -> worker_pb2.PromptLogprobs:
    """Makes the message of the log probabilities of an attempt's prompt."""
    return worker_pb2.PromptLogprobs(
        attempt_id=attempt_id, records=[record_message(record) for record in records]
    )


def record_of(message: worker_pb2.TokenRecord) -> TokenRecord:
    """Makes the engine's token record of a message.

    Raises:
        MalformedMessage: packed values are cut short.
    """
    if len(message.top_logprobs) % _PACKED_LOGPROB.itemsize:
        raise MalformedMessage("log probabilities")
    return TokenRecord(
        token_id=message.token_id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_ids=tuple(unpack_ids(message.top_ids).tolist()),
        top_logprobs=tuple(np.frombuffer(message.top_logprobs, _PACKED_LOGPROB).tolist()),
    )


class FirstTokens(NamedTuple):
    """The first token of every choice; see `engine.types.Prefilled`."""

    records: tuple[TokenRecord, ...]
    sampled_ns: int
    """Unix nanoseconds of the prefill worker's clock; 0 if it did not say."""
    drafted_from: int = 0


def encode_first_tokens(records: Sequence[TokenRecord], at_ns: int, drafted_from: int = 0) -> bytes:
    """Makes the payload of a transfer's last notification: the first token of every choice.

    If they do not fit, alternatives are left out, and then log probabilities. The router has them
    from the prefill worker's own stream.
    """
    message = worker_pb2.FirstToken(sampled_unix_ns=at_ns, drafted_from_page=drafted_from)
    message.records.extend(map(record_message, records))
    for fields in (("top_ids", "top_logprobs"), ("logprob",)):
        if message.ByteSize() <= MAX_PAYLOAD_BYTES:
            break
        for record in message.records:
            for field in fields:
                record.ClearField(field)
    return message.SerializeToString()


def decode_first_tokens(payload: bytes, choices: int) -> FirstTokens:
    """Reads the payload of a transfer's last notification.

    Raises:
        MalformedMessage: it does not hold one token for each of `choices`.
    """
    try:
        message = worker_pb2.FirstToken.FromString(payload)
    except DecodeError:
        raise MalformedMessage("payload") from None
    if len(message.records) != choices:
        raise MalformedMessage("payload")
    records = map(record_of, message.records)
    return FirstTokens(tuple(records), message.sampled_unix_ns, message.drafted_from_page)


def first_tokens(request: Request, records: Sequence[TokenRecord], at_ns: int) -> NewTokens:
    """The next token of every choice, as the transfer brought them from the prefill worker."""
    count = len(records)
    return NewTokens(
        request_ids=[request.id] * count,
        choices=np.arange(count, dtype=np.int32),
        indices=np.array([resumed_tokens(request, i) for i in range(count)], np.int32),
        token_ids=np.array([record.token_id for record in records], np.int32),
        scored={i: record for i, record in enumerate(records) if record.logprob is not None},
        at_ns=at_ns,
    )


def tokens_message(tokens: NewTokens, rows: Sequence[int]) -> worker_pb2.Tokens:
    """Makes the message of some rows of a step's tokens."""
    scored = [(at, tokens.scored[row]) for at, row in enumerate(rows) if row in tokens.scored]
    where = np.array(rows, np.intp)
    return worker_pb2.Tokens(
        attempt_ids=[tokens.request_ids[row] for row in rows],
        choice_indices=pack_ids(tokens.choices[where]),
        indices=pack_ids(tokens.indices[where]),
        token_ids=pack_ids(tokens.token_ids[where]),
        scored_rows=pack_ids([at for at, _ in scored]),
        records=[record_message(record) for _, record in scored],
    )


def joined_tokens(parts: Sequence[worker_pb2.Tokens]) -> worker_pb2.Tokens:
    """The rows of several messages of tokens as one message, in order."""
    joined = worker_pb2.Tokens(
        choice_indices=b"".join(part.choice_indices for part in parts),
        indices=b"".join(part.indices for part in parts),
        token_ids=b"".join(part.token_ids for part in parts),
    )
    scored_rows: list[TokenIds | PageIds] = []
    for part in parts:
        scored_rows.append(unpack_ids(part.scored_rows) + len(joined.attempt_ids))
        joined.attempt_ids.extend(part.attempt_ids)
        joined.records.extend(part.records)
    joined.scored_rows = pack_ids(np.concatenate(scored_rows))
    return joined


def end_reason_message(reason: EndReason) -> worker_pb2.EndReason.ValueType:
    """The wire's word for the reason why a choice ended."""
    return _END_REASONS[reason]


def failed_message(
    attempt_id: bytes, reason: worker_pb2.FailureReason.ValueType | FailureReason, hook: str = ""
) -> worker_pb2.WorkResponse:
    """Makes the message that an attempt failed. `hook` names the hook, if one is the reason."""
    value = _FAILURE_REASONS[reason] if isinstance(reason, FailureReason) else reason
    failed = worker_pb2.Failed(attempt_id=attempt_id, reason=value, hook=hook)
    return worker_pb2.WorkResponse(failed=failed)


def model_message(model: ModelInfo) -> worker_pb2.ModelInfo:
    """Makes the message that describes a loaded model to routers and peers."""
    return worker_pb2.ModelInfo(
        name=model.name,
        path=model.path,
        revision=model.revision,
        fingerprint=f"{model.fingerprint}.{wire.VERSION}",
        max_context_tokens=model.max_context_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        page_size_tokens=model.page_size_tokens,
        kv_precision=model.kv_precision,
        prefix_cache=model.prefix_cache,
        resume_pages=model.resume_pages,
        extensions=model.extensions,
        sampling=worker_pb2.SamplingDefaults(**asdict(model.sampling)),
        pooling=defaults_message(model.pooling) if model.pooling.width else None,
    )


def endpoint_message(endpoint: Endpoint) -> worker_pb2.KvEndpoint:
    """Makes the message that says where this worker's pool can be written."""
    return worker_pb2.KvEndpoint(
        agent_name=endpoint.agent_name,
        transport=endpoint.transport,
        metadata=endpoint.metadata,
        base_address=endpoint.base_address,
        page_bytes=endpoint.groups[0].page_bytes,
        num_pages=endpoint.groups[0].num_pages,
        device_id=endpoint.device_id,
        memory=endpoint.memory,
        scratch_page=SCRATCH_PAGE,
        process=endpoint.process,
        kv_heads=endpoint.groups[0].units,
        ranks=map(endpoint_message, endpoint.ranks),
        stages=endpoint.stages,
        groups=[_group_message(group) for group in endpoint.groups if not group.digest],
        drafts=next((_group_message(group) for group in endpoint.groups if group.digest), None),
    )


def _group_message(group: PageGroup) -> worker_pb2.KvGroup:
    return worker_pb2.KvGroup(**group._asdict())


def _group_of(message: worker_pb2.KvGroup) -> PageGroup:
    values = {name: getattr(message, name) for name in PageGroup._fields}
    several = {"planes": tuple(message.planes), "bands": tuple(message.bands)}
    return PageGroup(**values | several)


def endpoint_of(message: worker_pb2.KvEndpoint) -> Endpoint:
    """Reads where a peer's pool can be written. That of a release without groups has none."""
    return Endpoint(
        agent_name=message.agent_name,
        transport=message.transport,
        metadata=message.metadata,
        base_address=message.base_address,
        groups=tuple(
            _group_of(group)
            for group in (*message.groups, *([message.drafts] if message.drafts.digest else ()))
        ),
        device_id=message.device_id,
        memory=message.memory,
        process=message.process,
        stages=max(1, message.stages),
        ranks=tuple(map(endpoint_of, message.ranks)),
    )


def _sampling_of(message: worker_pb2.Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed,
        logit_bias=dict(message.logit_bias),
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
        grammar=message.grammar,
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(_run(word) for word in message.bad_words),
        thinking=_thinking_of(message.thinking) if message.HasField("thinking") else None,
    )


def _thinking_of(message: worker_pb2.ThinkingBudget) -> ThinkingBudget:
    begin_ids, end_ids = _run(message.begin_ids), _run(message.end_ids)
    if not end_ids:
        raise MalformedMessage("thinking")
    return ThinkingBudget(message.tokens, begin_ids, end_ids)


def _run(packed: bytes) -> tuple[int, ...]:
    return tuple(unpack_ids(packed).tolist())
