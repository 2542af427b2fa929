"""Requests of this API that come by no connection: the lines of batches.

They are read, checked, answered, traced and logged as those of clients are.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.trace import SpanKind

from router import errors
from router.batching.running import Answer
from router.call import AccessRecord, Call, Caller, Peer
from router.doors.auth import NOBODY
from router.doors.http.dialect import CHATS, OWN_NAMES
from router.doors.http.statuses import http_status
from router.doors.openai.chat import ChatCompletions
from router.doors.openai.completions import Completions
from router.doors.openai.pooling import Embeddings
from router.pooling.pooling import Poolings
from router.requests.generation import Generations
from telemetry.names import Attr
from telemetry.tracing import context_of, end_span, start_span, trace_id_of

if TYPE_CHECKING:
    from router.doors.http.edge import Method
    from router.events import RouterEvents
    from router.jobs import Dispatcher
    from router.requests.bounds import BodyShape
    from router.requests.tokenization import Tokenizers
    from router.requests.validation import Limits

COMPLETIONS: Final = "/v1/completions"
CHAT_COMPLETIONS: Final = "/v1/chat/completions"
EMBEDDINGS: Final = "/v1/embeddings"


class Inside:
    """The methods that a batch may call, which HTTP serves as well.

    Args:
        dispatcher: runs the jobs.
        tokenizers: of its models.
        limits: of requests.
        events: receives events of requests.
        shape: bounds a body.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizers: Tokenizers,
        limits: Limits,
        events: RouterEvents,
        shape: BodyShape,
    ) -> None:
        self.generations = Generations(dispatcher, tokenizers, limits, events)
        self.poolings = Poolings(dispatcher, tokenizers, limits, events)
        self.shape = shape
        self.methods: dict[str, Method] = {
            COMPLETIONS: Completions(self.generations, dispatcher, tokenizers, shape),
            CHAT_COMPLETIONS: ChatCompletions(self.generations, dispatcher, tokenizers),
            EMBEDDINGS: Embeddings(self.poolings, shape),
        }

    async def send(self, url: str, body: Any, caller: Caller = NOBODY, batch: str = "") -> Answer:
        """Answers a request.

        Args:
            url: one of the methods.
            body: JSON.
            caller: whose request it is.
            batch: the id of its batch.
        """
        attributes = {Attr.HTTP_ROUTE: url, Attr.BATCH_ID: batch}
        span = start_span(f"BATCH {url}", None, attributes, kind=SpanKind.INTERNAL)
        context = context_of(span)
        call = Call(
            id=trace_id_of(context) or uuid.uuid4().hex,
            context=context,
            record=AccessRecord(method=f"BATCH {url}", client_tag=batch),
            peer=Peer(address=batch, connection=batch),
            whole=True,
            is_batch=True,
        ).admitted(caller)
        failed = ""
        try:
            data = json.dumps(body).encode()
            self.shape.check_known(len(data))
            self.shape.check_json(data)
            answer = await self.methods[url](data, call, batch)
            del data
            status, content, retry_after_s = 200, await answer.whole(), None
        except Exception as error:
            described = errors.describe(error, call.id)
            dialect = OWN_NAMES if url == EMBEDDINGS else CHATS
            status, content = http_status(described), dialect.error(described, call.id)
            failed, retry_after_s = described.reason, described.retry_after_s
        except BaseException:
            end_span(span, error="CANCELLED")
            raise
        end_span(
            span,
            attributes={Attr.HTTP_RESPONSE_STATUS_CODE: status},
            error=failed if status >= 500 else "",
        )
        call.record.write(call.id, call.arrived_ns, status, failed)
        return Answer(status, call.id, content, retry_after_s, is_final=retry_after_s is None)
