"""/tokenize and /detokenize, in the form of vLLM's server: a prompt's token ids, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.inference.v1 import inference_pb2 as api
from router.doors.http.parsing import parse
from router.doors.http.said import Said
from router.doors.openai.schema import DetokenizeRequest
from router.doors.openai.turns import TokenizeRequest
from router.split_names import BEGINNING
from router.visible import Visible

if TYPE_CHECKING:
    from router.call import Call
    from router.doors.http.statuses import JSON
    from router.jobs import Dispatcher
    from router.requests.bounds import BodyShape
    from router.requests.generation import Generations


class Tokens:
    """Both methods. They raise RouterError if a request cannot be understood or answered."""

    def __init__(self, generations: Generations, dispatcher: Dispatcher, shape: BodyShape) -> None:
        self._generations = generations
        self._dispatcher = dispatcher
        self._shape = shape

    async def tokenize(self, body: bytes, call: Call, client_tag: str) -> Said:
        """The ids that a generation would run."""
        asked = parse(TokenizeRequest, body)
        prompt: JSON = {} if asked.prompt is None else {"text": asked.prompt}
        if asked.messages:
            prompt = {"chat": asked.chat()}
        request = api.TokenizeRequest(
            model=asked.model,
            add_special_tokens=asked.add_special_tokens,
            token_texts=bool(asked.return_token_strs),
            **prompt,
        )
        request.model = self._generations.model_for(request, call)
        async with self._generations.deadline(call):
            response = await self._generations.tokenize(request, call)
        model = Visible(self._dispatcher, call).model(request.model)
        return Said(
            {
                "count": len(response.token_ids),
                "max_model_len": model.max_context_tokens,
                "tokens": list(response.token_ids),
                "token_strs": list(response.token_texts) if asked.return_token_strs else None,
            },
            asked.ignored(),
        )

    async def detokenize(self, body: bytes, call: Call, client_tag: str) -> Said:
        """The text of ids."""
        asked = parse(DetokenizeRequest, body, self._shape.most_elements())
        begun = api.TokenIds(ids=asked.tokens[:BEGINNING])
        prompt = api.GenerationInput(model=asked.model, token_ids=begun)
        model = self._generations.model_for(prompt, call)
        async with self._generations.deadline(call):
            text = await self._generations.detokenize(model, asked.tokens, call)
        return Said({"prompt": text}, asked.ignored())
