"""Access to the nested values of `stats --json`; a daemon of another version may lack some. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

Values = Mapping[str, object]


def section(values: object, *keys: str) -> Values:
    """The mapping at ``keys``, empty if there is none."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values if isinstance(values, Mapping) else {}


def number(values: object, *keys: str) -> float:
    """The count or gauge at ``keys``, 0 if it is not reported."""
    value = section(values, *keys[:-1]).get(keys[-1])
    return value if isinstance(value, int | float) else 0
