"""Chat templates that give tools to a model, each in the words of a family."""

from __future__ import annotations

from typing import Final

_TURNS: Final = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}"""
HERMES: Final = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call with <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    + _TURNS
    + "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's and Hermes' form."""
THINKING: Final = (
    HERMES
    + "{%- if add_generation_prompt %}"
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    + "{% elif forced %}<think>\n{% endif %}{% endif %}"
)
"""The same for a model that thinks: by itself, not at all, or because the prompt begins it."""
LLAMA: Final = (
    "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    'Call with {"name": f, "parameters": {}} or <|python_tag|>.{% endif %}'
    + _TURNS.replace("<tool_call>", "").replace("</tool_call>", "")
    + "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Llama 3's form."""
THINKS: Final = (
    "{%- if add_generation_prompt %}{% if enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Goes behind one of these: the prompt begins the thinking if it is asked for, else ends it."""
