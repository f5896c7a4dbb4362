"""A model's configuration, read key by key, with every value checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvarena.plugin.commands.plan.errors import ModelConfigError
from kvarena.plugin.commands.plan.text import printable

__all__ = ["MAX_DIM", "MAX_LAYERS", "MAX_TOKENS", "Fields", "Notes"]

#: Nothing published comes near; what is above is a slip, and would only make other numbers absurd.
MAX_LAYERS = 10_000
MAX_DIM = 1 << 24
MAX_TOKENS = 1 << 40

_INDEX_NAME = re.compile(r"(layers?|attn|attention|window|swa)(_layers?)?(_(idxs?|ids|index(es)?|indices))?$")


@dataclass(slots=True)
class Notes:
    """What a plan took for granted, in the order in which it was taken; each said once."""

    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        line = printable(line, 400)
        if line not in self.lines:
            self.lines.append(line)


class Fields:
    """One object of a configuration file.

    A key that the file leaves out takes its model class's default, and a note says so; a key that is
    ``null`` is an answer ("none"), not an omission.

    Parameters
    ----------
    data : Mapping
        The object.
    path : str
        Where it stands in the file, for messages: ``""`` or ``"text_config"``.
    notes : Notes
        Where assumptions are written down.
    defaults : Mapping
        What the model's class assumes for a key that is left out.
    """

    __slots__ = ("_data", "_defaults", "_path", "_read", "model_type", "notes")

    def __init__(
        self,
        data: Mapping[str, Any],
        *,
        path: str = "",
        notes: Notes | None = None,
        defaults: Mapping[str, Any] | None = None,
        model_type: str = "",
    ) -> None:
        self._data = data
        self._path = path
        self._defaults = defaults or {}
        self._read: set[str] = set()
        self.notes = notes if notes is not None else Notes()
        self.model_type = model_type

    def name(self, key: str) -> str:
        """A key as a reader finds it in the file."""
        return f"{self._path}.{key}" if self._path else key

    def note(self, line: str) -> None:
        self.notes.add(line)

    def __contains__(self, key: str) -> bool:
        self._read.add(key)
        return key in self._data

    def stated(self, key: str) -> bool:
        """Whether the file gives a value, and not ``null``."""
        self._read.add(key)
        return self._data.get(key) is not None

    def has_default(self, key: str) -> bool:
        """Whether the file leaves a key out and the model's class has an answer."""
        return key not in self._data and self._defaults.get(key) is not None

    def raw(self, key: str) -> Any:
        """The value as it stands, or the class's default, or ``None``."""
        self._read.add(key)
        if key in self._data:
            return self._data[key]
        default = self._defaults.get(key)
        if default is not None:
            self.note(
                f"{self.name(key)} is not in the file: {_show(default)}, the default of {self.model_type}."
            )
        return default

    def error(self, key: str, what: str, *, fix: str = "") -> ModelConfigError:
        return ModelConfigError(self.name(key), what, fix=fix)

    def count(self, *keys: str, maximum: int = MAX_DIM, minimum: int = 1) -> int | None:
        """A whole number from the first of several spellings; all that are stated must agree.

        Raises
        ------
        ModelConfigError
            Not a whole number from `least` to `most`, or two spellings that contradict each other.
        """
        found: tuple[str, int] | None = None
        for key in keys:
            if not self.stated(key):
                continue
            value = self.whole(key, self._data[key], maximum=maximum, minimum=minimum)
            if found is not None and found[1] != value:
                raise self.error(
                    key,
                    f"is {value} but {self.name(found[0])} is {found[1]}, and both mean the same",
                    fix="Remove one of them.",
                )
            found = found or (key, value)
        if found is not None:
            return found[1]
        for key in keys:
            if key not in self._data and (default := self.raw(key)) is not None:
                return self.whole(key, default, maximum=maximum, minimum=minimum)
        return None

    def need(self, *keys: str, maximum: int = MAX_DIM, why: str = "") -> int:
        """`count`, where the plan cannot go on without it."""
        value = self.count(*keys, maximum=maximum)
        if value is None:
            spelt = f" (also read as {', '.join(keys[1:])})" if len(keys) > 1 else ""
            reason = f": {why}" if why else ""
            raise self.error(
                keys[0], f"is missing{spelt}{reason}", fix="Add it, or give the geometry by options."
            )
        return value

    def whole(self, key: str, value: Any, *, maximum: int = MAX_DIM, minimum: int = 1) -> int:
        """A checked whole number, whatever it was read from."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(
                key, f"is {_show(value)}, not a whole number", fix="Write it as a number without quotes."
            )
        if value < minimum:
            wanted = "positive" if minimum == 1 else f"at least {minimum}"
            raise self.error(key, f"is {_show(value)}; it must be {wanted}", fix="Correct it, or remove it.")
        if value > maximum:
            raise self.error(
                key, f"is {_show(value)}; more than {maximum} is not believed", fix="Correct it."
            )
        return value

    def flag(self, key: str) -> bool | None:
        """A yes or no, or ``None`` where there is neither value nor default."""
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"is {_show(value)}; it must be true or false")
        return value

    def text(self, key: str) -> str | None:
        """A string, or ``None``."""
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, f"is {_show(value)}; it must be a string")
        return value

    def items(self, key: str, *, maximum: int = MAX_LAYERS) -> Sequence[Any] | None:
        """A list, or ``None``."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise self.error(key, f"is {_show(value)}; it must be a list")
        if len(value) > maximum:
            raise self.error(key, f"has {len(value)} entries; more than {maximum} is not believed")
        return value

    def unread_lists(self, entries: int) -> list[str]:
        """Lists (and strings in letters) of so many entries that nobody has asked for."""
        return [
            key
            for key, value in self._data.items()
            if key not in self._read and isinstance(value, (list, str)) and len(value) == entries
            if isinstance(value, list) or (value.isupper() and len(set(value)) <= 6)
        ]

    def unread_indices(self, below: int) -> list[str]:
        """Lists of whole numbers up to `below`, named after layers, that nobody has asked for."""
        return [
            key
            for key, value in self._data.items()
            if key not in self._read and _INDEX_NAME.search(key) and isinstance(value, list) and value
            if all(type(item) is int and 0 <= item <= below for item in value)
        ]

    def indices(self, key: str, layers: int, *, first: int = 0) -> frozenset[int] | None:
        """A list of layer numbers, counted from `first` in the file and from 0 in the answer."""
        values = self.items(key)
        if values is None:
            return None
        found = []
        for value in values:
            index = self.whole(key, value, maximum=layers - 1 + first, minimum=first) - first
            found.append(index)
        return frozenset(found)

    def block(self, key: str) -> Fields | None:
        """A nested object, or ``None``."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {_show(value)}; it must be an object")
        return Fields(value, path=self.name(key), notes=self.notes, model_type=self.model_type)


def _show(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        # Python refuses to print integers of more than 4300 digits.
        return str(value) if value.bit_length() < 256 else f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return "an object"
    return repr(value)
