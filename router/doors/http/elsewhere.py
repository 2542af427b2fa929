"""Paths of other APIs that are not served, and what there is instead."""

from __future__ import annotations

from typing import Final

_INSTEAD: Final = (
    ("/v1/audio", "Baton has no audio; its models read and write text"),
    ("/v1/realtime", "Baton has no audio; /v1/responses streams text"),
    ("/v1/images", "Baton makes no images; its models read and write text"),
    ("/v1/videos", "Baton makes no videos; its models read and write text"),
    ("/v1/moderations", "Baton has no moderation model of its own; ask a model that it serves"),
    (
        "/v1/fine_tun",
        "Baton trains nothing; workers serve what was trained elsewhere",
    ),
    ("/v1/assistants", "assistants are /v1/responses here: previous_response_id goes on"),
    ("/v1/threads", "threads are /v1/responses here: previous_response_id goes on"),
    ("/v1/conversations", "conversations are /v1/responses here: previous_response_id goes on"),
    ("/v1/vector_stores", "Baton has no search; give the texts to a model"),
    ("/v1/messages/batches", "there are no batches of messages; send them one by one"),
    ("/v1/uploads", "/v1/files takes a file whole"),
    ("/v1/load_lora", "operators load adapters at the router's admin port: `baton adapters load`"),
    ("/v1/unload_lora", "operators unload adapters at the router's admin port"),
    ("/v1/complete", "the older API of texts is /v1/completions here, and messages /v1/messages"),
)
"""Beginnings of paths."""


_CHAT: Final = "/v1/chat/completions"
_TEXT: Final = "/v1/completions, or /v1/chat/completions for turns"
_VECTORS: Final = "/v1/embeddings"
_NO_SLEEP: Final = "Baton does not sleep; `baton up` and Ctrl-C start and stop it"
_WHOLE: Final = {
    # vLLM's
    "/metrics": "metrics are at the router's admin port (`--admin`, 9090 unless told otherwise)",
    "/load": "the load is in /metrics of the router's admin port",
    "/server_info": "the settings are shown by `baton config`",
    "/inference/v1/generate": f"that is {_TEXT} here, which takes token ids as well",
    "/invocations": f"SageMaker's API is {_CHAT} here",
    "/pooling": f"that is {_VECTORS} here",
    "/classify": "Baton classifies nothing; structured output with `choice` comes close",
    "/reset_prefix_cache": "there is no such command; `cache_salt` keeps prompts apart",
    "/sleep": _NO_SLEEP,
    "/wake_up": _NO_SLEEP,
    "/is_sleeping": _NO_SLEEP,
    # Ollama's
    "/api/chat": f"Ollama's API is {_CHAT} here, with the base URL http://HOST:PORT/v1",
    "/api/generate": "Ollama's API is /v1/completions here, with the base URL http://HOST:PORT/v1",
    "/api/tags": "the models are at /v1/models",
    "/api/ps": "the models are at /v1/models",
    "/api/show": "the models are at /v1/models, and a chat template at /tokenizer_info",
    "/api/version": "the release is at /version",
    "/api/pull": "models come with workers: `baton up --model ORG/NAME`",
    "/api/embed": f"that is {_VECTORS} here",
    "/api/embeddings": f"that is {_VECTORS} here",
    # TGI's, SGLang's and llama.cpp's
    "/generate": f"that is {_TEXT} here",
    "/generate_stream": f"that is {_TEXT} with `stream` here",
    "/completion": f"that is {_TEXT} here",
    "/info": "the models are at /v1/models, and the release at /version",
    "/get_model_info": "the models are at /v1/models",
    "/model_info": "the models are at /v1/models",
    "/props": "the models are at /v1/models, and a chat template at /tokenizer_info",
    "/chat_tokenize": "that is /tokenize with `messages` here",
    "/apply-template": "/tokenize with `messages` and `return_token_strs` shows the prompt",
    "/embed": f"that is {_VECTORS} here",
    "/embedding": f"that is {_VECTORS} here",
    # Of nobody
    "/": "the API is below /v1; /openapi.json describes it",
    "/v1": "the API is below /v1; /openapi.json describes it",
    "/docs": "there is no page of the API; /openapi.json describes it",
    "/redoc": "there is no page of the API; /openapi.json describes it",
}
"""Paths that other servers have."""


def not_served(path: str, served: str) -> str:
    """The message for a path that is not served."""
    for beginning, instead in _INSTEAD:
        if path.startswith(beginning):
            return f"no such path: {instead}"
    if path in _WHOLE:
        return f"no such path: {_WHOLE[path]}"
    known = served.split(", ")
    if f"/v1{path}" in known:
        return f"no such path: it is /v1{path}"
    if (lower := path.lower()) in known and lower != path:
        return f"no such path: it is {lower}"
    return f"no such path: there are {served}"
