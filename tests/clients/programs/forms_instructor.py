"""Instructor in its modes: forms_instructor.py BASE_URL MODEL."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    """A city. The demo model is small, so its texts are short."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    people: int = Field(ge=0, le=9_999_999)


base, model = sys.argv[1:]
modes = (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
)
parsed = []
for mode in modes:
    client = instructor.from_openai(
        openai.OpenAI(base_url=base, api_key="none", max_retries=0), mode=mode
    )
    got = client.chat.completions.create(
        model=model,
        response_model=City,
        messages=[{"role": "user", "content": "Tell me about Paris."}],
        temperature=0,
        max_tokens=80,
        max_retries=0,
        **({"parallel_tool_calls": False} if mode is not instructor.Mode.JSON_SCHEMA else {}),
    )
    parsed.append(got.model_dump())
print(json.dumps({"parsed": parsed}))
