"""OpenAI's client for Python: with_openai.py BASE_URL MODEL."""

import json
import sys
import time

import openai

base, model = sys.argv[1:]
client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
messages = [{"role": "user", "content": "What is the capital of France?"}]
asked = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 16}
said = {"chat": client.chat.completions.create(**asked).choices[0].message.content}
parts = client.chat.completions.create(**asked, stream=True)
said["stream"] = "".join(part.choices[0].delta.content or "" for part in parts)
said["text"] = (
    client.completions.create(
        model=model, prompt="The capital of France is", temperature=0, max_tokens=8
    )
    .choices[0]
    .text
)
vectors = client.embeddings.create(model=model, input=["fox", "dog"], dimensions=16).data
said["embedded"] = [len(one.embedding) for one in vectors]
line = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
line["body"] = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
)
while batch.status not in ("completed", "failed"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
result = json.loads(client.files.content(batch.output_file_id).text)
said["batch"] = result["response"]["body"]["choices"][0]["text"]
try:
    client.chat.completions.create(**asked | {"messages": [messages[0] | {"content": "a " * 9999}]})
except openai.BadRequestError as error:
    said["too_long"] = error.code
print(json.dumps(said))
