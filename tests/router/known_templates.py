"""Chat templates with the mechanisms of well-known models', written anew. Each is named after the
model whose mechanisms it has."""

from __future__ import annotations

from typing import Final

QWEN: Final = """
{%- set ns = namespace(seeks=true, last=messages|length - 1) %}
{%- for m in messages[::-1] %}
  {%- set index = (messages|length - 1) - loop.index0 %}
  {%- if ns.seeks and m.role == 'user' and m.content is string and not m.content.endswith('!') %}
    {%- set ns.seeks = false %}{%- set ns.last = index %}
  {%- endif %}
{%- endfor %}
{%- for m in messages %}
  {%- set content = m.content if m.content is string else '' %}
  {%- if m.role == 'assistant' %}
    {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
    {{- '[' ~ ns.last ~ thought.strip('\\n') + ']' + content.lstrip('\\n') }}
    {%- for call in m.tool_calls or [] %}
      {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
      {%- if call.function %}{%- set call = call.function %}{%- endif %}
      {{- call.name }}
      {%- if call.arguments is string %}{{- call.arguments }}
      {%- else %}{{- call.arguments | tojson }}{%- endif %}
    {%- endfor %}
  {%- elif m.role == 'tool' %}
    {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<' }}{%- endif %}
    {{- content }}
    {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '>' }}{%- endif %}
  {%- endif %}
{%- endfor %}
"""
LLAMA: Final = """
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}
  {%- set date_string = strftime_now('%d %b %Y') %}
{%- endif %}
{{- date_string }}
{%- if not tools is none %}
  {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for m in messages %}
  {%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}
    {{- '<' + m['role'] + '>' + m['content'] | trim }}
  {%- elif 'tool_calls' in m %}
    {%- set call = m.tool_calls[0].function %}
    {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
  {%- elif m.content is mapping or m.content is iterable %}{{- m.content | tojson }}
  {%- else %}{{- m.content }}{%- endif %}
{%- endfor %}
"""
MISTRAL: Final = """
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages | rejectattr('role', 'equalto', 'tool')
    | rejectattr('tool_calls', 'defined') %}
  {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('no') }}{%- endif %}
{%- endfor %}
{%- for m in messages %}
  {%- if m['role'] == 'user' %}
    {%- if tools is not none and (m == asked[-1]) %}
      {%- for tool in tools %}
        {%- for key, val in tool.function.items() if key != 'return' %}
          {%- if val is string %}{{- key + '="' + val + '"' }}
          {%- else %}{{- key + '=' + val | tojson }}{%- endif %}
          {%- if not loop.last %}{{- ', ' }}{%- else %}{{- ';' }}{%- endif %}
        {%- endfor %}
      {%- endfor %}
    {%- endif %}
    {{- m['content'] }}
  {%- elif m.tool_calls is defined and m.tool_calls is not none %}
    {%- for call in m.tool_calls %}
      {%- set out = call.function | tojson %}
      {{- out[:-1] }}{{- ', "id": "' + call.id + '"}' }}
    {%- endfor %}
  {%- elif m['role'] == 'tool' %}
    {%- if m.content is defined and m.content.content is defined %}
      {%- set content = m.content.content %}
    {%- else %}{%- set content = m.content %}{%- endif %}
    {{- '{"content": ' + content | string + ', "id": "' + m.tool_call_id + '"}' }}
  {%- endif %}
{%- endfor %}
"""
DEEPSEEK: Final = """
{%- set ns = namespace(is_first=false, is_tool=false) -%}
{%- for m in messages -%}
  {%- if m['role'] == 'user' -%}{%- set ns.is_tool = false -%}{{ 'U' + m['content'] }}{%- endif -%}
  {%- if m['role'] == 'assistant' and 'tool_calls' in m -%}
    {%- for tool in m['tool_calls'] -%}
      {%- if not ns.is_first -%}
        {{- 'A' + tool['type'] + ':' + tool['function']['name'] + '\\n```json\\n'
            + tool['function']['arguments'] + '\\n```' }}{%- set ns.is_first = true -%}
      {%- else -%}{{ '\\n' + tool['function']['name'] + tool['function']['arguments'] }}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {%- if m['role'] == 'tool' -%}{%- set ns.is_tool = true -%}{{ 'O' + m['content'] }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.is_tool -%}{{ '<think>\\n' }}{%- endif -%}
"""
GEMMA: Final = """
{{- bos_token -}}
{%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] -%}
{%- else -%}{%- set prefix = messages[0]['content'][0]['text'] -%}{%- endif -%}
{%- for m in messages[1:] -%}
  {{- '<' + ('model' if m['role'] == 'assistant' else m['role']) + '>'
      + (prefix if loop.first else '') -}}
  {%- if m['content'] is string -%}{{ m['content'] | trim }}
  {%- elif m['content'] is iterable -%}
    {%- for item in m['content'] -%}
      {%- if item['type'] == 'image' -%}I
      {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
    {%- endfor -%}
  {%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}
{%- endfor -%}
"""
GPT_OSS: Final = """
{%- macro written(spec, required) -%}
  {%- if spec.type == 'array' -%}
    {{- written(spec['items'], required) + '[]' if spec['items'] else 'any[]' }}
  {%- elif spec.type is defined and spec.type is iterable and spec.type is not string -%}
    {{- spec.type | join(' | ') }}
  {%- elif spec.properties -%}
    {%- for name, each in spec.properties.items() -%}
      {{- name -}}{%- if name not in (required or []) -%}?{%- endif -%}: {{ written(each, []) }}
    {%- endfor -%}
  {%- else -%}any{%- endif -%}
{%- endmacro -%}
{%- for t in tools or [] -%}
  {%- set tool = t.function -%}
  {{- '// ' + (tool.description or '') + '\\ntype ' + tool.name + ' = ' }}
  {%- if tool.parameters and tool.parameters.properties -%}
    {{- written(tool.parameters, tool.parameters.required) }}
  {%- else -%}() => any{%- endif -%}
{%- endfor -%}
{%- set last = namespace(name=none) -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' and m.tool_calls -%}
    {%- set call = m.tool_calls[0].function or m.tool_calls[0] -%}
    {%- if m.content and m.thinking -%}{{- raise_exception('both') }}
    {%- elif m.thinking -%}{{- '<analysis>' + m.thinking }}{%- endif -%}
    {{- 'functions.' + call.name }}{{- call.arguments | tojson }}{%- set last.name = call.name -%}
  {%- elif m.role == 'tool' -%}
    {%- if last.name is none -%}{{- raise_exception('no call') }}{%- endif -%}
    {{- 'functions.' + last.name }}{{- m.content | tojson }}
  {%- else -%}{{- m.content }}{%- endif -%}
{%- endfor -%}
"""
GLM: Final = """
{%- macro visible(content) -%}
  {%- if content is string -%}{{- content }}
  {%- elif content is iterable and content is not mapping -%}
    {%- for item in content -%}
      {%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- endif -%}
    {%- endfor -%}
  {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{ visible(m.content) }}
  {%- elif m.tool_calls -%}
    {%- for call in m.tool_calls -%}
      {%- if call.function -%}{%- set call = call.function -%}{%- endif -%}
      {{- '<' + call.name }}{%- set _args = call.arguments -%}
      {%- for k, v in _args.items() -%}
        {{- k }}={{ v | tojson(ensure_ascii=False) if v is not string else v }}
      {%- endfor -%}
    {%- endfor -%}
  {%- else -%}{{- m.content }}{%- endif -%}
{%- endfor -%}
"""
