"""LangChain: with_langchain.py BASE_URL MODEL."""

import json
import sys

import openai
from langchain_openai import ChatOpenAI, OpenAI

base, model = sys.argv[1:]
to = {"base_url": base, "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(max_tokens=16, **to)
question = "What is the capital of France?"
said = {"chat": chat.invoke(question).content}
said["stream"] = "".join(str(part.content) for part in chat.stream(question))
said["text"] = OpenAI(max_tokens=8, **to).invoke("The capital of France is")
try:
    chat.invoke("a " * 9999)
except openai.BadRequestError as error:
    said["too_long"] = error.code
print(json.dumps(said))
