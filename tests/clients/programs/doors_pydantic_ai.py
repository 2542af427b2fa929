"""Pydantic AI over both doors: doors_pydantic_ai.py URL MODEL."""

import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]


base, model = sys.argv[1:]
models = (
    OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=f"{base}/v1", api_key="none")),
    AnthropicModel(model, provider=AnthropicProvider(base_url=base, api_key="none")),
)
said = []
for one in models:
    agent = Agent(one, output_type=City, model_settings={"temperature": 0, "max_tokens": 48})
    said.append(agent.run_sync("Tell me about Paris.").output.name)
print(json.dumps({"cities": said}))
