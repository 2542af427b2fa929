"""LiteLLM with a schema and a tool: forms_litellm.py BASE_URL MODEL."""

import json
import sys

import litellm
from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    """A city. The demo model is small, so its texts are short."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    people: int = Field(ge=0, le=9_999_999)


base, model = sys.argv[1:]
asked = {
    "model": f"openai/{model}",
    "api_base": base,
    "api_key": "none",
    "messages": [{"role": "user", "content": "Tell me about Paris."}],
    "temperature": 0,
    "max_tokens": 80,
}
schema = {
    "type": "json_schema",
    "json_schema": {"name": "City", "schema": City.model_json_schema(), "strict": True},
}
tools = [
    {"type": "function", "function": {"name": "save_city", "parameters": City.model_json_schema()}}
]
whole = litellm.completion(**asked, response_format=schema)
parts = litellm.completion(**asked, response_format=schema, stream=True)
text = "".join(part.choices[0].delta.content or "" for part in parts)
texts = [whole.choices[0].message.content, text]
said = {"parsed": [City.model_validate_json(text).model_dump() for text in texts]}
only = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
called = litellm.completion(**asked, **only).choices[0]
said["finish"] = called.finish_reason
said["called"] = City.model_validate_json(
    called.message.tool_calls[0].function.arguments
).model_dump()
chunks = list(litellm.completion(**asked, **only, stream=True))
built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
assert built.function.arguments == called.message.tool_calls[0].function.arguments
turns = [
    *asked["messages"],
    called.message.model_dump(),
    {"role": "tool", "tool_call_id": called.message.tool_calls[0].id, "content": "Saved."},
]
after = litellm.completion(**{**asked, "messages": turns}, tools=tools)
said["after"] = after.choices[0].finish_reason
print(json.dumps(said))
