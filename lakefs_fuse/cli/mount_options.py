"""Turns ``-o k=v,…``, as mount(8) passes it, into long options, before click parses the arguments.

So `-o` and long options share names, checks and defaults, and the last one wins. Options for mount(8) itself are
dropped; any other that is no long option is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import click

_FOR_MOUNT_ITSELF = frozenset(
    {
        "_netdev",
        "async",
        "auto",
        "defaults",
        "exec",
        "group",
        "noatime",
        "noauto",
        "nodev",
        "nodiratime",
        "nofail",
        "nosuid",
        "nouser",
        "owner",
        "relatime",
        "user",
        "users",
    }
)
"""Not for the filesystem, or (nosuid, nodev, noatime) true of every mount of this program."""

_ALIASES = {"ro": "read-only", "rw": "read-write"}


def expand(args: Iterable[str], flags: Mapping[str, bool]) -> list[str]:
    """``args`` with every ``-o`` replaced. ``flags`` maps long options (no dashes) to whether they take no value.

    Raises click.UsageError.
    """
    expanded: list[str] = []
    rest = iter(args)
    for arg in rest:
        if arg == "--":
            return [*expanded, arg, *rest]
        if arg == "-o":
            value = next(rest, None)
            if value is None:
                raise click.UsageError("option -o needs a value: -o key=value,…")
            expanded += _long_options(value, flags)
        elif arg.startswith("-o"):
            expanded += _long_options(arg[2:], flags)
        else:
            expanded.append(arg)
            name = arg.removeprefix("--")
            if arg.startswith("--") and flags.get(name) is False:
                # The next argument is its value, even if it looks like an option.
                expanded += [value] if (value := next(rest, None)) is not None else []
    return expanded


def known_only(text: str, flags: Mapping[str, bool]) -> str:
    """The value of an ``-o`` without unknown options, for ``-s`` of mount(8)."""
    items = (item for item in text.split(",") if _long_name(item.partition("=")[0]) in flags)
    return ",".join(items)


def _long_name(key: str) -> str:
    return _ALIASES.get(key, key.replace("_", "-"))


def _long_options(text: str, flags: Mapping[str, bool]) -> list[str]:
    found: list[str] = []
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if key in _FOR_MOUNT_ITSELF or key.startswith(("x-", "X-")) or key == "comment":
            continue
        name = _long_name(key)
        if name not in flags:
            raise click.UsageError(f"unknown mount option {key!r} in -o: use a long option of mount")
        if flags[name] and equals:
            raise click.UsageError(f"mount option {key!r} in -o takes no value")
        if not flags[name] and not equals:
            raise click.UsageError(f"mount option {key!r} in -o needs a value: -o {key}=…")
        found.append(f"--{name}={value}" if equals else f"--{name}")
    return found
