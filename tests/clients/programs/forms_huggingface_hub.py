"""huggingface_hub, with schemas in the form of TGI: forms_huggingface_hub.py BASE_URL MODEL."""

import json
import sys

from huggingface_hub import InferenceClient

base, model = sys.argv[1:]
client = InferenceClient(base_url=base, api_key="none")
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 9_999_999},
    },
    "required": ["name", "people"],
    "additionalProperties": False,
}
asked = {
    "model": model,
    "messages": [{"role": "user", "content": "Tell me about Paris."}],
    "temperature": 0,
    "max_tokens": 80,
}
forms = (
    {"type": "json_object", "value": CITY},
    {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}},
)
parsed = [
    json.loads(client.chat_completion(**asked, response_format=form).choices[0].message.content)
    for form in forms
]
tool = {"type": "function", "function": {"name": "city", "parameters": CITY}}
one = {"parallel_tool_calls": False}
answer = client.chat_completion(
    **asked, tools=[tool], tool_choice="required", extra_body=one
).choices[0]
(call,) = answer.message.tool_calls
parts = client.chat_completion(**asked, stream=True)
text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
assert text
said = {"parsed": parsed, "called": json.loads(call.function.arguments)}
print(json.dumps({**said, "finish": answer.finish_reason, "after": "stop"}))
