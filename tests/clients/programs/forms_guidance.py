"""guidance, which sends a grammar under two names: forms_guidance.py BASE_URL MODEL."""

import json
import sys

import guidance
from guidance.models import OpenAI

base, model = sys.argv[1:]
city = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 9_999_999},
    },
    "required": ["name", "people"],
    "additionalProperties": False,
}
lm = OpenAI(model, base_url=base, api_key="none", echo=False)
with guidance.user():
    lm += "Tell me about Paris."
parsed = []
for _ in range(2):
    with guidance.assistant():
        found = lm + guidance.json("city", schema=city, max_tokens=80)
    parsed.append(json.loads(found["city"]))
print(json.dumps({"parsed": parsed}))
