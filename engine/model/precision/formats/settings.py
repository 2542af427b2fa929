"""Reads a checkpoint's own description, and says of what is not supported which key it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.model.config import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Settings:
    """An object of the description."""

    where: str
    """Its place: `config.json:`, `config.json: quantization_config`, and so on."""
    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """A value; null is as good as no value."""
        value = self.values.get(key)
        return default if value is None else value

    def path(self, key: str) -> str:
        """The place of a value."""
        return f"{self.where}{' ' if self.where.endswith(':') else '.'}{key}"

    def first(self, *keys: str) -> str:
        """The first of these keys that has a value, or the last."""
        return next((key for key in keys if self.get(key) is not None), keys[-1])

    def refusal(self, key: str, works: str) -> UnsupportedModelError:
        """The error for the value of a key."""
        value = self.values.get(key)
        said = f"is {value!r}" if key in self.values else "is missing"
        return UnsupportedModelError(f"{self.path(key)} {said}, which is not supported; {works}")

    def one_of(self, key: str, supported: Sequence[Any], default: Any = None) -> Any:
        """A value that must be one of these. Case does not count.

        Raises:
            UnsupportedModelError: it is another.
        """
        value = self.get(key, default)
        value = value.lower() if isinstance(value, str) else value
        if value not in supported:
            raise self.refusal(key, f"supported: {', '.join(map(_said, supported))}")
        return value

    def absent(self, *keys: str, works: str) -> None:
        """Refuses keys that have a value other than null, false or empty.

        Raises:
            UnsupportedModelError: one of them has.
        """
        for key in keys:
            if self.values.get(key):
                raise self.refusal(key, works)

    def inner(self, key: str) -> Settings:
        """An object inside.

        Raises:
            UnsupportedModelError: it is none.
        """
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.refusal(key, "an object is")
        return Settings(self.path(key), value)

    def names(self, *keys: str) -> tuple[str, ...]:
        """The names in lists under any of these keys.

        Raises:
            UnsupportedModelError: one of them is no list of strings.
        """
        found: list[str] = []
        for key in keys:
            value = self.get(key, [])
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise self.refusal(key, "a list of names is")
            found += value
        return tuple(found)

    def group(self, key: str, default: int = 0) -> int:
        """Inputs that share a scale; 0: all of a channel, which is written as -1.

        Raises:
            UnsupportedModelError: it is no such number.
        """
        value = self.get(key, default)
        if type(value) is not int or (value < 1 and value != -1):
            raise self.refusal(key, "a number of inputs is, and -1 for all of a channel")
        return 0 if value == -1 else value


def _said(value: Any) -> str:
    return "null" if value is None else str(value).lower() if type(value) is bool else str(value)
