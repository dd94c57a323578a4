"""Options of `mount` that expand to long options: ``-o k=v,…``, as mount(8) passes it, and the sets of
``--profile-for``.

`expand` turns `-o` into long options before click parses the arguments. So both share names, checks and defaults, and
the last one wins. Options for mount(8) itself are dropped; any other that is no long option is an error that names it.

What always holds (*explicit options win*): a set gives values only to options that were not given and that apply to the
mount. docs/operations.md has the sets and the reason of each value; `tests/cli/test_workloads.py` compares.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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

WORKLOADS: Mapping[str, Sequence[str]] = {
    "training-read": ("--read-only", "--metadata-ttl=10m", "--refresh=30s", "--requests=64"),
    "checkpoints": ("--durability=writeback", "--staging-size=200GiB", "--free-space=10GiB", "--uploads=16"),
    "notebook": (
        "--refresh=1s", "--metadata-ttl=10s", "--retry-timeout=20s", "--staging-timeout=5m", "--cache-size=5GiB",
    ),
    "ci": (
        "--durability=close", "--cache-size=2GiB", "--staging-size=5GiB", "--retry-timeout=30s", "--staging-timeout=2m",
        "--maintenance=off", "--no-supervise",
    ),
}  # fmt: skip
OF_WRITERS = frozenset({"checkpoints"})
"""Sets that have no use on a read-only mount."""


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
            close = difflib.get_close_matches(name, flags, 1)
            meant = f"did you mean {close[0].replace('-', '_')}?" if close else "use a long option of mount"
            raise click.UsageError(f"unknown mount option {key!r} in -o: {meant}")
        if flags[name] and equals:
            raise click.UsageError(f"mount option {key!r} in -o takes no value")
        if not flags[name] and not equals:
            raise click.UsageError(f"mount option {key!r} in -o needs a value: -o {key}=…")
        found.append(f"--{name}={value}" if equals else f"--{name}")
    return found


def describe_sets() -> str:
    """All sets of options, for help."""
    return "; ".join(f"{name}: {' '.join(typed).replace('=', ' ')}" for name, typed in WORKLOADS.items())


def settings_of(workload: str, command: click.Command) -> dict[str, Any]:
    """The values of a set, by the names of the parameters of ``command``."""
    found: dict[str, Any] = {}
    for typed in WORKLOADS[workload]:
        flag, _, text = typed.partition("=")
        param = next(each for each in command.params if flag in (*each.opts, *each.secondary_opts))
        assert isinstance(param, click.Option)
        assert param.name is not None
        found[param.name] = flag in param.opts if param.is_flag else param.type.convert(text, param, None)
    return found
