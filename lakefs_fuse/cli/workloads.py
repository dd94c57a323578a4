"""Named sets of options for `mount --profile-for`: what a kind of work needs, as one types it.

What always holds (*explicit options win*): a set gives values to options only that were not given, and none that has no
meaning for the mount. docs/operations.md has the sets and the reason of each value; `tests/cli/test_workloads.py`
compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

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
"""Sets that are of no use to a mount that does not write."""


def describe() -> str:
    """All sets, for help."""
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
