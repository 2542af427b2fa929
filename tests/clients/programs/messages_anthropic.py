"""Anthropic's client over /v1/messages: messages_anthropic.py URL MODEL."""

import json
import sys
from typing import Literal

from anthropic import Anthropic, BadRequestError
from pydantic import BaseModel, ConfigDict


class City(BaseModel):
    """A city. The client drops bounds of a schema, and the demo model is small."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Paris", "Rome"]
    people: Literal[1, 2]


base, model = sys.argv[1:]
api = Anthropic(base_url=base, api_key="none", max_retries=0).messages
asked = {"model": model, "max_tokens": 64, "extra_body": {"temperature": 0}}
question = [{"role": "user", "content": "Tell me about Paris."}]
tool = {"name": "save_city", "input_schema": City.model_json_schema()}
once = {"type": "any", "disable_parallel_tool_use": True}


def streamed(**fields):
    with api.stream(**asked, **fields) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


france = [{"role": "user", "content": "What is the capital of France?"}]
plain = api.create(**{**asked, "max_tokens": 16}, messages=france)
counted = api.count_tokens(model=model, messages=france).input_tokens
parsed = api.parse(**asked, messages=question, output_format=City).parsed_output
called = api.create(**asked, messages=question, tools=[tool], tool_choice=once)
(call,) = called.content
again = streamed(messages=question, tools=[tool], tool_choice=once)
assert again.content[0].input == call.input
several = streamed(messages=question, tools=[tool], tool_choice={"type": "any"})
result = {"type": "tool_result", "tool_use_id": call.id, "content": "Saved."}
turns = [
    *question,
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [result]},
]
after = api.create(**asked, messages=turns, tools=[tool])
thought = streamed(messages=question, thinking={"type": "enabled", "budget_tokens": 8})
try:
    api.create(**asked, messages=[{"role": "user", "content": "word " * 9000}])
    too_long = None
except BadRequestError as error:
    too_long = error.body["error"]["type"]
said = {
    "chat": plain.content[0].text,
    "counted": counted == plain.usage.input_tokens + plain.usage.cache_read_input_tokens,
    "parsed": [parsed.model_dump()],
    "called": call.input,
    "finish": called.stop_reason,
    "several": [block.type for block in several.content],
    "after": after.stop_reason,
    "thought": [block.type for block in thought.content],
    "too_long": too_long,
}
print(json.dumps(said))
