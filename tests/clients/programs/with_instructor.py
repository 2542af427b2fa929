"""Instructor, which asks for JSON in the prompt: with_instructor.py BASE_URL MODEL."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel, ConfigDict


class Anything(BaseModel):
    """An object."""

    model_config = ConfigDict(extra="allow")


base, model = sys.argv[1:]
client = instructor.from_openai(
    openai.OpenAI(base_url=base, api_key="none", max_retries=0), mode=instructor.Mode.MD_JSON
)
question = 'What is the capital of France? Answer with JSON like {"name": "Berlin"}.'
got = client.chat.completions.create(
    model=model,
    response_model=Anything,
    messages=[{"role": "user", "content": question}],
    temperature=0,
    max_tokens=256,
    max_retries=0,
    # The demo model is too small to keep to a form that it is only told.
    extra_body={"guided_regex": r'Sure:\n```json\n\{"name": "[A-Z][a-z]{2,12}"\}\n```'},
)
print(json.dumps({"fields": sorted(got.model_extra)}))
