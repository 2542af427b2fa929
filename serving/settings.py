"""Reads the settings of every process.

Flags beat the environment (`BATON_*`), the environment beats the file, the file beats the defaults.
`resolve` merges the four once, at start, into one frozen model: `worker.settings` or
`router.settings` declares it. Later nothing reads the environment. `baton config` prints the result
and the source of each value.

The file is TOML with one table for each kind of process, `[worker]` and `[router]`. `--config`
names the file, else `BATON_CONFIG` does. Otherwise it is `baton.toml` in the working directory, if
that exists.

Rarely needed settings have tables of their own, `[worker.debug]` and `[router.debug]`. The
variables `BATON_DEBUG_*` set them; they have no flags. A setting that moved there is accepted under
its old name for one more release, with a warning (`moved_to_debug` of a settings model).
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
)

from baton.addresses import port_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pydantic.fields import FieldInfo

CONFIG_VARIABLE: Final = "BATON_CONFIG"
DEFAULT_FILE: Final = Path("baton.toml")
TABLES: Final = ("router", "worker")
"""Tables of the file."""
PREFIX: Final = "BATON_"
"""Begins the name of each environment variable."""
DEBUG_PREFIX: Final = "BATON_DEBUG_"
"""Begins the name of each environment variable of a rarely needed setting."""
DEBUG: Final = "debug"
"""Name of the table, and of the field, of rarely needed settings."""

Settings = TypeVar("Settings", bound=BaseModel)


WRONG_USE: Final = 2
"""Exit code where settings, a model or files of the operator are wrong: to start again changes
nothing. typer's own for a wrong command."""


class SettingsError(Exception):
    """Settings are wrong. The message names the field and says what is wrong."""


def _split(value: object) -> object:
    """Splits `a,b`, or a list of such strings, into a tuple."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    return tuple(item.strip() for part in parts for item in str(part).split(",") if item.strip())


def _host_and_port(value: str) -> str:
    """Checks `HOST:PORT` or `[V6]:PORT`. With port 0 the system chooses the port."""
    if port_of(value) is None:
        raise ValueError("must be HOST:PORT or [V6]:PORT")
    return value


def _own_or_other(value: str) -> str:
    """Checks an address that may be empty. A file with an empty host variable yields `:0`."""
    return value if value in ("", ":0") else _host_and_port(value)


def _address_or_none(value: str) -> str:
    """Checks an address that may be empty."""
    return value and _host_and_port(value)


_RECEIVER: Final = re.compile(r"(https?://|grpcs://)?([^\s/@]+)/?")
"""Groups: scheme and address."""


def _receiver(value: str) -> str:
    """Checks the address of a receiver of spans, which may be empty. TLS has a default port."""
    scheme, address = found.groups() if (found := _RECEIVER.fullmatch(value)) else ("", "")
    has_usual_port = scheme == "https://" and ":" not in address
    if value and not has_usual_port and not port_of(address):
        raise ValueError(
            "must be http://HOST:PORT, https://HOST:PORT, grpcs://HOST:PORT or HOST:PORT, with no "
            "path: spans go over gRPC"
        )
    return value


_FABRIC: Final = re.compile(r"(trusted|encrypted):[0-9a-fA-F.:]+/\d+")


def _fabric(value: str) -> str:
    """Checks the form of a fabric, which may be empty."""
    if value and not _FABRIC.fullmatch(value):
        raise ValueError("must be trusted:CIDR or encrypted:CIDR, such as trusted:10.1.0.0/24")
    return value


Address = Annotated[str, AfterValidator(_host_and_port)]
AddressOrNone = Annotated[str, AfterValidator(_address_or_none)]
OtlpEndpoint = Annotated[str, AfterValidator(_receiver)]
Fabric = Annotated[str, AfterValidator(_fabric)]
Words = Annotated[tuple[str, ...], BeforeValidator(_split)]
Numbers = Annotated[tuple[int, ...], BeforeValidator(_split)]
Addresses = Annotated[tuple[Address, ...], BeforeValidator(_split)]
Advertised = Annotated[str, AfterValidator(_own_or_other)]

MOST_TOKENS: Final = 1 << 24
"""Upper bound of token settings. It is beyond any context and fits every field of a message."""


SETTINGS: Final = ConfigDict(
    frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
)
"""Configuration of every settings model."""


class Resolved(NamedTuple, Generic[Settings]):
    """Settings and the source of each value."""

    settings: Settings
    sources: Mapping[str, str]
    """By field: "flag", the environment variable's name, the file's path or "default". Fields of
    the table `debug` are named `debug.FIELD`."""
    warnings: Sequence[str] = ()
    """A line for each setting that was given under an old name."""


def resolve(
    kind: type[Settings], table: str, flags: Mapping[str, Any], file: Path | None = None
) -> Resolved[Settings]:
    """Merges flags, environment, file and defaults.

    Args:
        kind: the settings model.
        table: its table in the file.
        flags: values from the command line; None counts as not set.
        file: the file; None: `BATON_CONFIG`, else `baton.toml` if it exists.

    Raises:
        SettingsError: the file cannot be read, or a value does not fit its field.
    """
    path = _file(file)
    from_file = _table(path, table) if path else {}
    given = {name: value for name, value in flags.items() if value is not None}
    tables = (from_file.pop(DEBUG, {}), given.pop(DEBUG, {}))
    if not all(isinstance(content, dict) for content in tables):
        raise SettingsError(f"{table}: `{DEBUG}` must be a table")
    moved = moved_to_debug(kind)
    values, sources = _merge(kind, from_file, given, str(path), PREFIX, moved)
    old = {name: (values.pop(name), sources.pop(name)) for name in moved & values.keys()}
    debug, debug_sources = _merge(debug_settings(kind), *tables, str(path), DEBUG_PREFIX)
    for name, (value, source) in old.items():
        debug.setdefault(name, value)
        debug_sources.setdefault(name, source)
    try:
        settings = kind(**values, debug=debug)
    except ValidationError as error:
        raise SettingsError(_explain(error, table, kind)) from None
    sources |= {f"{DEBUG}.{name}": source for name, source in debug_sources.items()}
    warnings = [_moved(table, name, source) for name, (_, source) in sorted(old.items())]
    return Resolved(settings, dict.fromkeys(fields(kind), "default") | sources, warnings)


def moved_to_debug(kind: type[BaseModel]) -> frozenset[str]:
    """Settings of the table `debug` that stood outside of it in the last release."""
    moved: frozenset[str] = getattr(kind, "moved_to_debug", frozenset())
    return moved


def _moved(table: str, name: str, source: str) -> str:
    """Says what takes the place of an old name."""
    old = f"--{name.replace('_', '-')}" if source == "flag" else f"{source}: {name}"
    old = source if source == f"{PREFIX}{name}".upper() else old
    new = f"{DEBUG_PREFIX}{name}".upper()
    return f"{old} moved: set {new}, or `{name}` in [{table}.{DEBUG}]; the old name goes with 0.4.0"


def _merge(
    kind: type[BaseModel],
    from_file: dict[str, Any],
    given: dict[str, Any],
    path: str,
    prefix: str,
    moved: frozenset[str] = frozenset(),
) -> tuple[dict[str, Any], dict[str, str]]:
    """Merges the values of one table, also of moved settings. Returns them and their sources."""
    environment = {name.upper(): value for name, value in os.environ.items()}
    names = (kind.model_fields.keys() | moved) - {DEBUG}
    variables = {name: f"{prefix}{name}".upper() for name in names}
    set_ones = {name: variable for name, variable in variables.items() if variable in environment}
    from_environment = {name: environment[variable] for name, variable in set_ones.items()}
    sources = dict.fromkeys(from_file, path) | set_ones | dict.fromkeys(given, "flag")
    return {**from_file, **from_environment, **given}, sources


def debug_settings(kind: type[BaseModel]) -> type[BaseModel]:
    """The model of a process's table `debug`."""
    debug = kind.model_fields[DEBUG].annotation
    assert isinstance(debug, type), "a table of settings"
    assert issubclass(debug, BaseModel), "a table of settings"
    return debug


def fields(kind: type[BaseModel]) -> dict[str, FieldInfo]:
    """All settings of a process. Fields of the table `debug` are named `debug.FIELD`."""
    named = {name: field for name, field in kind.model_fields.items() if name != DEBUG}
    debug = debug_settings(kind).model_fields
    return named | {f"{DEBUG}.{name}": field for name, field in debug.items()}


def _file(named: Path | None) -> Path | None:
    if named is None and (variable := os.environ.get(CONFIG_VARIABLE)):
        named = Path(variable)
    if named is None:
        return DEFAULT_FILE if DEFAULT_FILE.is_file() else None
    return named


def _table(path: Path, table: str) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from None
    for name in tables.keys() - set(TABLES):
        raise SettingsError(f"{path}: `{name}` is neither [router] nor [worker]")
    content = tables.get(table, {})
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: [{table}] must be a table")
    return content


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggests a known name for an unknown one, as the end of a message."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f" (did you mean `{found[0]}`?)" if found else ""


def _explain(error: ValidationError, table: str, kind: type[BaseModel]) -> str:
    """One line per wrong field, in the words of the command line."""
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"]) or table
        if problem["type"] == "default_factory_not_called":
            continue  # Another problem caused it.
        if problem["type"] == "missing":
            lines.append(f"{table}: `{field}` is not set (--{field.replace('_', '-')})")
        elif problem["type"] == "extra_forbidden":
            lines.append(f"{table}: there is no setting `{field}`{_hint(field, kind)}")
        else:
            rule = problem["msg"].removeprefix("Value error, ")
            got = f" (got {problem['input']!r})" if _is_shown(kind, field) else ""
            where = f"{table}: `{field}`: " if problem["loc"] else f"{table}: "
            lines.append(f"{where}{rule}{got}")
    return "\n".join(lines)


def _is_shown(kind: type[BaseModel], field: str) -> bool:
    """Whether messages may quote a value: of a field that is no secret, and not of all at once."""
    known = fields(kind)
    found = known.get(field) or known.get(field.partition(".")[0])
    return found is not None and found.repr


def _hint(field: str, kind: type[BaseModel]) -> str:
    """Suggests a correction of an unknown setting, as the end of a message."""
    if f"{DEBUG}.{field}" in fields(kind):
        return f" (it is in the table `{DEBUG}`)"
    return nearest(field, fields(kind))
