"""Types of option values (sizes, rates, durations, modes) and the texts in which they are printed.

A bare unit letter is binary (500M is 500 MiB), as in mount(8) and dd; KB, MB, GB, TB are decimal.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from lakefs_fuse.config import parse_duration, parse_size
from lakefs_fuse.errors import ConfigError

if TYPE_CHECKING:
    _Type = click.ParamType[float | None]
else:  # click before 8.5 has no subscript
    _Type = click.ParamType


class Quantity(_Type):
    """A number that ``parse`` reads from text; its ConfigError becomes a usage error."""

    def __init__(self, name: str, parse: Callable[[str], float | None]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        if isinstance(value, int | float):
            return value
        try:
            return self._parse(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class LocalPath(click.Path):
    """A path of this machine. An empty one, such as that of a variable that is not set, is refused: it would be the
    working directory. With ``readable=False`` alone nothing is asked of the filesystem, whose daemon may hang."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("the path is empty", param, ctx)
        if not (self.exists or self.readable or self.writable or not self.dir_okay or not self.file_okay):
            return self.coerce_path_result(value)  # the base class calls stat(2) all the same
        return super().convert(value, param, ctx)


class Number(click.IntRange):
    """A whole number within bounds, and called so where it is none."""

    name = "whole number"


class Percent(click.FloatRange):
    """A number from 0 to 100."""

    def __init__(self) -> None:
        super().__init__(0, 100)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):  # within every range
            self.fail(f"{value!r} is not a number from 0 to 100", param, ctx)
        return number


def parse_foreign(text: str) -> float | None:
    """As `parse_duration`, and None for ``auto``. Raises ConfigError."""
    return None if text.strip().lower() == "auto" else parse_duration(text)


def parse_mode(text: str) -> int:
    """Permission bits in octal: ``644``, ``0755``. Raises ConfigError."""
    digits = text.removeprefix("0o")
    if not re.fullmatch(r"[0-7]{1,4}", digits) or int(digits, 8) > 0o777:
        raise ConfigError(f"{text!r} is not an octal mode: expected for example 644 or 0755")
    return int(digits, 8)


def parse_rate(text: str) -> int:
    """Bytes per second: ``500MiB/s``, ``2G``. Raises ConfigError."""
    try:
        return parse_size(text.strip().removesuffix("/s"))
    except ConfigError as error:
        raise ConfigError(f"{text!r} is not a rate: expected for example 500MiB/s, or 0 for no limit") from error


SIZE = Quantity("size", parse_size)
RATE = Quantity("rate", parse_rate)
DURATION = Quantity("duration", parse_duration)
OCTAL_MODE = Quantity("mode", parse_mode)
FOREIGN = Quantity("auto|duration", parse_foreign)


def format_bytes(count: float) -> str:
    """``count`` bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_duration(seconds: float) -> str:
    """``seconds`` for people: 1.5 ms, 12 s, 3 min, 2.5 h."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_LONGEST_FIRST = (("h", 3600.0), ("m", 60.0))
_LARGEST_FIRST = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10), ("", 0))


def value_text(name: str, value: object) -> str:
    """A value of config.py as one types it: sizes and durations in the largest exact unit, modes in octal."""
    if name.endswith("_mode"):
        return f"{value:o}"
    if name.endswith("_s") and isinstance(value, float):
        unit, seconds = next((each for each in _LONGEST_FIRST if value >= each[1] and not value % each[1]), ("s", 1.0))
        return f"{value / seconds:g}{unit}"
    if "bytes" in name and isinstance(value, int) and value:  # every unit keeps 0 whole: it needs none
        unit, bits = next((unit, bits) for unit, bits in _LARGEST_FIRST if value % (1 << bits) == 0)
        return f"{value >> bits}{unit}"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def default_text(name: str, value: object) -> str:
    """A default of config.py as help shows it."""
    return f"[default: {value_text(name, value) or 'none'}]"
