"""LangChain with a schema and a tool: forms_langchain.py BASE_URL MODEL."""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    """A city. The demo model is small, so its texts are short."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    people: int = Field(ge=0, le=9_999_999)


@tool(args_schema=City)
def save_city(name: str, people: int) -> str:
    """Saves a city."""
    return "Saved."


base, model = sys.argv[1:]
chat = ChatOpenAI(
    base_url=base, api_key="none", model=model, temperature=0, max_retries=0, max_tokens=80
)
question = HumanMessage("Tell me about Paris.")
parsed = [
    chat.with_structured_output(City, method=method).invoke([question]).model_dump()
    for method in ("json_schema", "function_calling")
]
bound = chat.bind_tools([save_city], tool_choice="required", parallel_tool_calls=False, strict=True)
called = bound.invoke([question])
streamed = None
for part in bound.stream([question]):
    streamed = part if streamed is None else streamed + part
assert streamed.tool_calls[0]["args"] == called.tool_calls[0]["args"]
answer = ToolMessage("Saved.", tool_call_id=called.tool_calls[0]["id"])
after = chat.bind_tools([save_city]).invoke([question, called, answer])
said = {
    "parsed": parsed,
    "finish": called.response_metadata["finish_reason"],
    "called": City(**called.tool_calls[0]["args"]).model_dump(),
    "after": after.response_metadata["finish_reason"],
}
print(json.dumps(said))
