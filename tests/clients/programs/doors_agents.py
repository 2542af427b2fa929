"""OpenAI's Agents SDK on its default path: doors_agents.py URL MODEL."""

import asyncio
import json
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

base, model = sys.argv[1:]
set_default_openai_client(AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0))
set_tracing_disabled(True)
looked: list[str] = []


@function_tool
def look(city: Literal["Paris", "Rome"]) -> str:
    """Looks at a city."""
    looked.append(city)
    return "It is big."


settings = ModelSettings(
    temperature=0, max_tokens=48, tool_choice="required", parallel_tool_calls=False
)
agent = Agent(
    name="one", instructions="Be brief.", model=model, tools=[look], model_settings=settings
)


async def main() -> None:
    whole = await Runner.run(agent, "Tell me about Paris.", max_turns=3)
    streamed = Runner.run_streamed(agent, "Tell me about Paris.", max_turns=3)
    async for _ in streamed.stream_events():
        pass
    same = whole.final_output == streamed.final_output
    print(json.dumps({"looked": looked, "same": same}))


asyncio.run(main())
