"""LiteLLM: with_litellm.py BASE_URL MODEL."""

import json
import sys

import litellm

base, model = sys.argv[1:]
litellm.suppress_debug_info = True
to = {"api_base": base, "api_key": "none", "temperature": 0, "num_retries": 0}
messages = [{"role": "user", "content": "What is the capital of France?"}]
asked = {"model": f"openai/{model}", "messages": messages, "max_tokens": 16, **to}
said = {"chat": litellm.completion(**asked).choices[0].message.content}
parts = litellm.completion(**asked, stream=True)
said["stream"] = "".join(part.choices[0].delta.content or "" for part in parts)
prompt = {"prompt": "The capital of France is", "max_tokens": 8, **to}
text = litellm.text_completion(model=f"text-completion-openai/{model}", **prompt)
said["text"] = text.choices[0].text
try:
    litellm.completion(**asked | {"messages": [messages[0] | {"content": "a " * 9999}]})
except litellm.ContextWindowExceededError:
    said["too_long"] = "context_length_exceeded"
print(json.dumps(said))
