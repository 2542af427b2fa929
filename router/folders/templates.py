"""The language of chat templates: jinja in a sandbox, with the helpers that transformers gives.

Templates come with a checkpoint, from any source. A template is a program and may raise anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.parser
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

DEFAULT: Final = "default"
TOOLS: Final = "tool_use"
"""Names of templates."""
_CONTENT: Final = "content"


class TemplateFileError(Exception):
    """A file with a chat template cannot be used; the message says why."""


class TemplateRefusalError(jinja2.TemplateError):
    """What a template raises by `raise_exception`, in its own words."""


class Template:
    """A chat template.

    Raises:
        jinja2.TemplateSyntaxError: the source is no template.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        parsed = environment.parse(source)
        self.names = frozenset(meta.find_undeclared_variables(parsed))
        """Variables that it reads."""
        self.takes_parts = any(map(_is_content, _looped(parsed)))
        """Whether it goes through the parts of a content. Others want one text."""
        self._source = source

    @cached_property
    def compiled(self) -> jinja2.Template:
        """The program. To compile it already computes what is constant, and may take any time and
        memory, so routers do it in a process aside.

        Raises:
            jinja2.TemplateSyntaxError: it uses what there is not.
        """
        return _environment().from_string(self._source)

    def render(self, **variables: object) -> str:
        """Text of a conversation."""
        return self.compiled.render(**variables)


class Templates:
    """The chat templates of a model."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        """Sources by name."""
        used: dict[str, str] = {
            name: self.sources[name] for name in (DEFAULT, TOOLS) if name in self.sources
        }
        self.text = "\n".join(used.values())
        """The sources of those that are used."""
        self._compiled = {name: Template(source) for name, source in used.items()}
        every = (one.names for one in self._compiled.values())
        self.names = frozenset[str]().union(*every)
        """Variables that they read."""

    def of(self, *, tools: bool) -> Template | None:
        """The template of a conversation with tools or without."""
        name = TOOLS if tools and TOOLS in self._compiled else DEFAULT
        return self._compiled.get(name)


def template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a folder by name, as transformers finds them. Files of their own come
    before an entry of the config. One for requests with tools is named `tool_use`."""
    found: dict[str, str] = {}
    if (file := folder / "chat_template.jinja").is_file():
        found[DEFAULT] = file.read_text(encoding="utf-8")
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if found:
        return found
    stated = config.get("chat_template")
    if isinstance(stated, list):
        stated = {entry["name"]: entry["template"] for entry in stated}
    if isinstance(stated, str):
        stated = {DEFAULT: stated}
    return dict(stated) if isinstance(stated, dict) else {}


def read_template(path: str) -> str | None:
    """The source in a file that replaces the models' own templates; None for "".

    Raises:
        TemplateFileError: it cannot be read, or is no template.
    """
    if not path:
        return None
    try:
        source = Path(path).read_text(encoding="utf-8")
        _ = Template(source).compiled
    except OSError as error:
        raise TemplateFileError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TemplateFileError(f"{path} is no text in UTF-8") from None
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFileError(f"{path}, line {error.lineno}: {error.message}") from None
    return source


def _environment() -> ImmutableSandboxedEnvironment:
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    found.filters["tojson"] = _to_json
    found.globals["raise_exception"] = _raise_exception
    found.globals["strftime_now"] = _strftime_now
    return found


class _GenerationBlock(Extension):
    """Renders `{% generation %}` as its body. The block marks the assistant's words for
    training."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it like this

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        """Returns the statements inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _looped(parsed: nodes.Template) -> Iterator[nodes.Node]:
    """What the template loops over, without filters."""
    for loop in parsed.find_all(nodes.For):
        over: nodes.Node | None = loop.iter
        while isinstance(over, nodes.Filter):
            over = over.node
        if over is not None:
            yield over


def _is_content(node: nodes.Node) -> bool:
    """Whether an expression is a turn's content: `message.content`, `message['content']`, or a
    variable of that name."""
    match node:
        case nodes.Getattr(attr=str(name)) | nodes.Name(name=str(name)):
            return name == _CONTENT
        case nodes.Getitem(arg=nodes.Const(value=name)):
            return bool(name == _CONTENT)
        case _:
            return False


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, and no model was trained on that.
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusalError(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - transformers' name
    return datetime.now().strftime(format)
