"""LangChain over both doors: doors_langchain.py URL MODEL."""

import json
import sys
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def look(city: Literal["Paris", "Rome"]) -> str:
    """Looks at a city."""
    return "It is big."


base, model = sys.argv[1:]
shared = {"model": model, "temperature": 0, "max_retries": 0, "api_key": "none", "max_tokens": 48}
chats = {
    "responses": ChatOpenAI(base_url=f"{base}/v1", use_responses_api=True, **shared),
    "messages": ChatAnthropic(base_url=base, **shared),
}
question = HumanMessage("Tell me about Paris.")
said = {}
for door, chat in chats.items():
    bound = chat.bind_tools([look], tool_choice="look", parallel_tool_calls=False)
    called = bound.invoke([question])
    streamed = None
    for part in bound.stream([question]):
        streamed = part if streamed is None else streamed + part
    (call,) = called.tool_calls
    assert streamed.tool_calls[0]["args"] == call["args"]
    answer = ToolMessage("It is big.", tool_call_id=call["id"])
    after = chat.bind_tools([look]).invoke([question, called, answer])
    said[door] = [call["args"]["city"], after.usage_metadata["output_tokens"] > 0]
print(json.dumps(said))
