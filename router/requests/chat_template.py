"""Chat templates: the programs that turn a model's conversations into one text.

They come with a checkpoint, from any source, so they run in a sandbox. The sandbox has the
variables and helpers that chat templates expect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.nodes
import jinja2.parser
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateFileError(Exception):
    """A file with a chat template cannot be used; the message says why."""


class Template(Protocol):
    """A compiled chat template."""

    def render(self, **variables: object) -> str:
        """Text of a conversation."""
        ...


def template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The default chat template: a file of its own, or an entry of the config."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


def read_template(path: str) -> str | None:
    """The source in a file that replaces the models' own templates; None for "".

    Raises:
        TemplateFileError: it cannot be read, or is no template.
    """
    if not path:
        return None
    try:
        source = Path(path).read_text(encoding="utf-8")
        compile_template(source)
    except OSError as error:
        raise TemplateFileError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TemplateFileError(f"{path} is no text in UTF-8") from None
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFileError(f"{path}, line {error.lineno}: {error.message}") from None
    return source


def compile_template(source: str) -> Template:
    """A template that can be rendered."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class _GenerationBlock(Extension):
    """Renders `{% generation %}` as its body. The block marks the assistant's words for
    training."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it like this

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Returns the statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, and no model was trained on that.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
