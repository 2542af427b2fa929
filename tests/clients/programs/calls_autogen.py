"""AutoGen's client with a tool and its result: calls_autogen.py BASE_URL MODEL."""

import asyncio
import json
import sys
from typing import Literal

from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    ModelFamily,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

base, model = sys.argv[1:]


async def note(name: Literal["Paris", "Rome"]) -> str:
    """Notes a city."""
    return f"noted {name}"


async def main() -> None:
    """Asks for a call, and goes on from its result."""
    info = dict.fromkeys(("vision", "json_output", "structured_output"), False)
    client = OpenAIChatCompletionClient(
        model=model,
        base_url=base,
        api_key="none",
        max_retries=0,
        max_tokens=40,
        temperature=0,
        model_info={**info, "function_calling": True, "family": ModelFamily.UNKNOWN},
    )
    turns = [UserMessage(content="Note Paris.", source="user")]
    tool = FunctionTool(note, description="Notes a city.")
    asked = await client.create(turns, tools=[tool], tool_choice=tool)
    (call,) = asked.content
    result = FunctionExecutionResult(
        content=await note(**json.loads(call.arguments)), call_id=call.id, name=call.name
    )
    turns += [
        AssistantMessage(content=asked.content, source="assistant"),
        FunctionExecutionResultMessage(content=[result]),
    ]
    after = await client.create(turns, tools=[tool], tool_choice="none")
    print(json.dumps({"calls": [[call.name, result.content]], "after": after.content}))


asyncio.run(main())
