"""Options as vLLM's `LLM` and `SamplingParams` and OpenAI's clients name them, and what stands for
them here. Errors answer with it, and the page `docs/coming-from-vllm.md` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OTHER_NAMES: Final[Mapping[str, str]] = {
    "chat_template_kwargs": "`template_variables`",
    "continue_final_message": "`continue_last`",
    "detokenize": "`omit_text=True` stands for `False`",
    "guided_decoding": "`json_schema`, `json_object`, `regex`, `choice`, `gbnf` or `lark`",
    "include_stop_str_in_output": "`include_stop`",
    "logits_processors": "a hook ([Hooks](hooks.md))",
    "lora_request": "`model`, the name of one of the `adapters` that `LLM` was given",
    "max_completion_tokens": "`max_tokens`",
    "n": "`choices`",
    "prompt_token_ids": "`token_ids`, or ids in place of a prompt",
    "response_format": "`json_schema` or `json_object`",
    "sampling_params": "each option by its name, such as `temperature=0.8`",
    "structured_outputs": "`json_schema`, `json_object`, `regex`, `choice`, `gbnf` or `lark`",
    "use_beam_search": "`beams`",
    "use_tqdm": "nothing: a terminal shows a bar",
}
"""What to use instead, as Markdown."""


def here(name: str) -> str:
    """The end of an error that names an unknown option; "" if nobody calls one so."""
    ours = OTHER_NAMES.get(name, "").partition(" (")[0].replace("`", "")
    return f"; here: {ours}" if ours else ""
