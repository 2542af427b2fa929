"""OpenAI's client for Python with a schema and a tool: forms_openai.py BASE_URL MODEL."""

import json
import sys

import openai
from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    """A city. The demo model is small, so its texts are short."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    people: int = Field(ge=0, le=9_999_999)


base, model = sys.argv[1:]
client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
messages = [{"role": "user", "content": "Tell me about Paris."}]
asked = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 80}
tool = openai.pydantic_function_tool(City, name="save_city")
said = {"parsed": []}
whole = client.chat.completions.parse(**asked, response_format=City)
said["parsed"].append(whole.choices[0].message.parsed.model_dump())
with client.chat.completions.stream(**asked, response_format=City) as stream:
    for _ in stream:
        pass
    final = stream.get_final_completion()
said["parsed"].append(final.choices[0].message.parsed.model_dump())
called = client.chat.completions.parse(
    **asked, tools=[tool], tool_choice="required", parallel_tool_calls=False
).choices[0]
said["finish"] = called.finish_reason
said["called"] = called.message.tool_calls[0].function.parsed_arguments.model_dump()
turns = [
    *messages,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            called.message.tool_calls[0].model_dump(exclude={"function": {"parsed_arguments"}})
        ],
    },
    {"role": "tool", "tool_call_id": called.message.tool_calls[0].id, "content": "Saved."},
]
after = client.chat.completions.create(**{**asked, "messages": turns}, tools=[tool])
said["after"] = after.choices[0].finish_reason
print(json.dumps(said))
