"""OpenAI's client over /v1/responses: responses_openai.py BASE_URL MODEL."""

import json
import sys
from typing import Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict


class City(BaseModel):
    """A city. The client drops bounds of a schema, and the demo model is small."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Paris", "Rome"]
    people: Literal[1, 2]


base, model = sys.argv[1:]
api = OpenAI(base_url=base, api_key="none", max_retries=0).responses
asked = {"model": model, "temperature": 0, "max_output_tokens": 64}
question = "Tell me about Paris."
function = pydantic_function_tool(City, name="save_city")["function"]
tool = {"type": "function", **function}


def streamed(**fields):
    with api.stream(**asked, **fields) as stream:
        *_, last = stream
        return last.response


plain = api.create(
    model=model, temperature=0, max_output_tokens=16, input="What is the capital of France?"
)
parsed = api.parse(**asked, input=question, text_format=City).output_parsed
from_stream = City.model_validate_json(streamed(input=question, text_format=City).output_text)
forced = {"tools": [tool], "tool_choice": "required"}
called = api.create(**asked, input=question, parallel_tool_calls=False, **forced)
(call,) = called.output
again = streamed(input=question, parallel_tool_calls=False, **forced)
assert again.output[0].arguments == call.arguments
several = streamed(input=question, **forced).output
result = {"type": "function_call_output", "call_id": call.call_id, "output": "Saved."}
turns = [{"role": "user", "content": question}, call, result]
after = api.create(**asked, input=turns, tools=[tool])
thought = streamed(
    input=question, reasoning={"effort": "low"}, extra_body={"thinking_token_budget": 8}
)
said = {
    "chat": plain.output_text,
    "parsed": [parsed.model_dump(), from_stream.model_dump()],
    "called": json.loads(call.arguments),
    "several": [item.type for item in several],
    "after": after.status,
    "thought": [item.type for item in thought.output],
}
print(json.dumps(said))
