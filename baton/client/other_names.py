"""Options as vLLM's `LLM` and `SamplingParams` and OpenAI's clients name them, and what stands for
them here. Errors answer with it, and the page `docs/coming-from-vllm.md` shows it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final

OTHER_NAMES: Final[Mapping[str, str]] = {
    "beam_width": "`beams`",
    "chat_template_kwargs": "`template_variables`",
    "continue_final_message": "`continue_last`",
    "detokenize": "`omit_text=True` stands for `False`",
    "guided_decoding": "`json_schema`, `json_object`, `regex`, `choice`, `gbnf` or `lark`",
    "guided_choice": "`choice`",
    "guided_grammar": "`gbnf` or `lark`",
    "guided_json": "`json_schema`",
    "guided_regex": "`regex`",
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


def stated(options: Mapping[str, object], known: type) -> dict[str, Any]:
    """The options that a caller states, of those that the typed dict has. None counts as left out.

    Raises:
        TypeError: there is no such option. It names what stands for it here, or the nearest name.
    """
    names = known.__annotations__
    for name in options:
        if name not in names:
            raise TypeError(f"there is no option {name!r}{_instead(name, names)}")
    return {name: value for name, value in options.items() if value is not None}


def _instead(name: str, known: Iterable[str]) -> str:
    ours = OTHER_NAMES.get(name, "").partition(" (")[0].replace("`", "")
    if ours:
        return f"; here: {ours}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f" (did you mean {near[0]!r}?)" if near else ""
