"""Writes `configuration.md`: every setting of a worker and of a router, from their models."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest import mock

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from reference import GENERATED, table
from router.settings import RouterSettings
from serving.settings import CONFIG_VARIABLE, DEBUG, DEFAULT_FILE, debug_settings, fields
from worker.settings import Role, WorkerSettings

INTRODUCTION = f"""\
# Configuration

{GENERATED}

Every process reads its settings once, when it starts. Flags beat the environment, the environment
beats the file, the file beats the defaults. The file is TOML with a table for each kind of process,
`[router]` and `[worker]`. `--config FILE` names it, else `{CONFIG_VARIABLE}` does, else it is
`{DEFAULT_FILE}` in the working directory. `baton config` prints the settings of a process, and the
source of each value, in the form of that file. An unknown key or a value out of its bounds ends the
process with a message that names it. A `BATON_*` variable that is no setting is ignored with a
warning.

```toml
# baton.toml
[router]
queue_timeout_s = 20

[worker]
max_sequences = 128
```

Each setting has three names: `max_sequences` in the file, `--max-sequences` as a flag and
`BATON_MAX_SEQUENCES` in the environment. A switch is `--trace-store` or `--no-trace-store` as a
flag, `true` or `false` elsewhere; a list is separated by commas.

Some settings are for experts and tests. They are in the tables `[router.debug]` and
`[worker.debug]` of the file and in `BATON_DEBUG_*`. They have no flags, and may change with any
release.
"""

COLUMNS = ("setting", "takes", "default", "what it is for")
UNITS = {"_s": "seconds", "_gib": "GiB", "_tokens": "tokens", "_gigabytes_per_s": "GB/s"}
BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "pattern": "`{}`"}
TYPES = {int: "integer", float: "number", bool: "`true`, `false`", str: "text", Path: "path"}
LISTS = {str: "list of texts", int: "list of integers"}


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for title, kind in (("Router", RouterSettings), ("Worker", WorkerSettings)):
        with mock.patch("socket.gethostname", return_value="HOST"):
            rows = [_row(name, field) for name, field in fields(kind).items()]
        usual = [row for row in rows if not row[0].startswith(f"`{DEBUG}.")]
        rare = [row for row in rows if row not in usual]
        parts.append(f"## {title}\n\n{inspect.getdoc(kind)}\n")
        parts.append(table(COLUMNS, *usual))
        parts.append(f"### {title}: rarely needed\n\n{inspect.getdoc(debug_settings(kind))}\n")
        parts.append(table(COLUMNS, *rare))
    return "\n".join(parts)


def _row(name: str, field: FieldInfo) -> tuple[str, ...]:
    names = f"`{name}`<br>`BATON_{name.replace('.', '_').upper()}`"
    if not name.startswith(f"{DEBUG}."):
        names = names.replace("<br>", f"<br>`--{name.replace('_', '-')}`<br>")
    return names, _takes(name, field), _default(field), str(field.description)


def _takes(name: str, field: FieldInfo) -> str:
    """Type, unit and bounds."""
    kind = field.annotation
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Role):
        return ", ".join(f"`{role}`" for role in Role)
    if get_origin(kind) is tuple:
        return LISTS.get(get_args(kind)[0], "list of `HOST:PORT`")
    addresses = name in ("admin", "listen", "internal_listen", "http_listen", "fast_listen")
    words = ["`HOST:PORT`" if addresses else TYPES[kind]]
    words += [unit for suffix, unit in UNITS.items() if name.endswith(suffix)][-1:]
    for bound in field.metadata:
        for key, said in BOUNDS.items():
            if (limit := getattr(bound, key, None)) is not None:
                words.append(said.format(f"{limit:,}" if isinstance(limit, int) else limit))
    return ", ".join(words)


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return _made(field.default_factory)
    value = field.default
    assert value is not PydanticUndefined, "a setting without a default"
    if isinstance(value, tuple):
        value = ",".join(value)
    if isinstance(value, bool):
        value = str(value).lower()
    return f"`{value}`" if str(value) else "empty"


def _made(factory: Any) -> str:
    """The value that a factory makes; one for each role if it depends on the role."""
    if not inspect.signature(factory).parameters:
        return f"`{factory()}`"
    made = {str(role): factory({"role": role}) for role in Role}
    if all(role in value for role, value in made.items()):
        return f"`{made['both'].replace('both', 'ROLE')}`"
    return "<br>".join(f"{role}: `{value}`" for role, value in made.items())
