"""LiteLLM over both doors: doors_litellm.py URL MODEL."""

import json
import sys

import litellm

base, model = sys.argv[1:]
question = "What is the capital of France?"
shared = {"api_key": "none", "temperature": 0, "num_retries": 0}
asked = {"model": f"openai/{model}", "api_base": f"{base}/v1", "input": question, **shared}
response = litellm.responses(**asked, max_output_tokens=16)
streamed = "".join(
    event.delta
    for event in litellm.responses(**asked, max_output_tokens=16, stream=True)
    if event.type == "response.output_text.delta"
)
messages = [{"role": "user", "content": question}]
asked = {"model": f"anthropic/{model}", "api_base": base, "messages": messages, **shared}
message = litellm.completion(**asked, max_tokens=16)
parts = litellm.completion(**asked, max_tokens=16, stream=True)
said = {
    "responses": response.output[0].content[0].text,
    "responses_streamed": streamed,
    "messages": message.choices[0].message.content,
    "messages_streamed": "".join(part.choices[0].delta.content or "" for part in parts),
}
print(json.dumps(said))
