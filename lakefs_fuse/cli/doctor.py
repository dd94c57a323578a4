"""`lakefs-fuse doctor`: checks a machine, a store and a mount, and says how to fix each problem. Checks without a store
and the kernel's libraries run here, the others in a child process (`daemon.diagnosis`). Each result is printed as soon
as it is known. Nothing is changed, except that temporary objects in the store are created and removed.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import platformdirs
from msgspec import structs

from lakefs_fuse.checks import CheckResult, Severity, failed, skipped
from lakefs_fuse.cli import machine_checks, mount_health
from lakefs_fuse.cli.bundle import Contents, write_bundle
from lakefs_fuse.cli.daemons import open_daemon
from lakefs_fuse.cli.help import SETTINGS, GroupedCommand, argument, option
from lakefs_fuse.cli.mount import default_cache_dir, default_log_file
from lakefs_fuse.cli.parameters import LocalPath
from lakefs_fuse.cli.preflight import ROOM_BYTES_MIN, Host
from lakefs_fuse.cli.stats_values import number, section
from lakefs_fuse.cli.store_options import Options, absolute, any_given, build_store, json_option, store_options
from lakefs_fuse.cli.terminal import escaped, print_json
from lakefs_fuse.cli.worker import DIAGNOSIS, run_child
from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.control.mounts import mount_at
from lakefs_fuse.control.runtime import real_mountpoint
from lakefs_fuse.control.worker_protocol import Diagnosis, Row
from lakefs_fuse.errors import EXIT_FAILURE, ConfigError, LakeError
from lakefs_fuse.product import PROGRAM

_WORDS = {Severity.OK: "ok", Severity.WARNING: "warning", Severity.FAILED: "FAILED", Severity.SKIPPED: "skipped"}

_FREE_BYTES_MIN = next(each.default for each in structs.fields(MountConfig) if each.name == "free_bytes_min")


@dataclass
class Target:
    """The targets of the checks besides this machine."""

    store: StoreConfig | None = None
    cache_dir: str = ""
    is_named: bool = True
    """``cache_dir`` is that of one mount."""
    read_only: bool = False
    log_file: str = ""
    statistics: dict[str, object] = field(default_factory=dict)
    """Of the daemon, for a mountpoint."""
    results: list[CheckResult] = field(default_factory=list)
    """What was found out about the daemon."""


@click.command("doctor", cls=GroupedCommand, context_settings=SETTINGS)
@argument("target", "A mountpoint, or the SOURCE of a lake as it is mounted. Without it only this machine is checked.",
          required=False)  # fmt: skip
@option("--cache-dir", type=LocalPath(), metavar="DIR", help="The cache directory to check.  [default: that of the "
        "mount, or the default of a mount of SOURCE]")  # fmt: skip
@option("--read-only", is_flag=True, help="Write nothing to the store, not even temporary objects. Use it with "
        "read-only credentials.")  # fmt: skip
@option("--throughput/--no-throughput", default=True, help="Measure the throughput to and from the store for 5 s, at "
        "most 1 GiB each way. Turn it off if traffic costs money.")  # fmt: skip
@option("--bundle", type=LocalPath(dir_okay=False), metavar="FILE", help="Write results, statistics, configuration "
        "and logs into a ZIP file, without secrets. Send it to the person who helps you.")  # fmt: skip
@json_option
@store_options
def doctor(
    target: str | None,
    cache_dir: str | None,
    read_only: bool,
    throughput: bool,
    bundle: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Check this machine, a store and a mount.

    \b
      lakefs-fuse doctor                                   # this machine
      lakefs-fuse doctor s3://bucket/prefix                # and whether a lake can be there
      lakefs-fuse doctor /mnt/lake --bundle report.zip     # and a mount; the file is for support

    Prints one line for each check: `ok`, or what to do. It tries every request that a mount sends, on temporary objects
    below `.lakefs/` that it removes, and reads the configuration of the bucket if it may. The credentials are those of
    this shell, which need not be those of a mount.

    Exit code 0 if nothing failed, else 1; warnings do not count.
    """
    wanted = _resolve(target, options)
    if cache_dir is not None:
        wanted.cache_dir = str(absolute(cache_dir))
    wanted.read_only = wanted.read_only or read_only
    found: list[CheckResult] = []

    def show(result: CheckResult) -> None:
        found.append(result)
        if not as_json:
            click.echo(line_of(result))

    for result in _checks(wanted):
        show(result)
    _run_diagnosis(wanted, throughput=throughput, show=show)
    is_ok = all(result.severity is not Severity.FAILED for result in found)
    if as_json:
        print_json({"ok": is_ok, "target": target, "checks": [_plain(result) for result in found]})
    if bundle is not None:
        configuration = {"target": target, "cache_dir": wanted.cache_dir, "store": wanted.store}
        write_bundle(Path(bundle).expanduser(), Contents(found, wanted.statistics, configuration, wanted.log_file))
        click.echo(f"{PROGRAM}: wrote {bundle}: read it before you send it", err=True)
    return 0 if is_ok else EXIT_FAILURE


def line_of(result: CheckResult) -> str:
    """A result as it is printed."""
    return escaped(f"{_WORDS[result.severity]:8} {result.check}: {result.text}")


def _plain(result: CheckResult) -> dict[str, object]:
    """A result for ``--json``."""
    return {
        "check": result.check, "severity": result.severity, "text": result.text, "values": result.values,
    }  # fmt: skip


def _resolve(target: str | None, options: Options) -> Target:
    """What TARGET names. Raises ConfigError."""
    if target is not None and "://" in target:
        store = build_store(Source.parse(target), options)
        return Target(store=store, cache_dir=default_cache_dir(store), read_only=store.unsigned)
    if flag := any_given(options):
        raise ConfigError(f"{flag} goes with a source URL: name the lake by its URL, or leave {flag} out")
    if target is None:
        return Target(cache_dir=platformdirs.user_cache_dir(PROGRAM), is_named=False)
    try:
        with open_daemon(target) as client:
            found = Target(store=client.store().store, statistics=client.statistics())
    except LakeError as error:
        point = real_mountpoint(target)
        if mount_at(point) is None and not os.path.lexists(point):
            raise ConfigError(
                f"{target} is neither a directory nor a URL: name a mountpoint, or a lake as s3://bucket/prefix or "
                "file:///absolute/dir"
            ) from error
        results = [
            failed("mount.daemon", str(error)),
            skipped("store.list", "only the daemon knows the settings of the store: give the URL of the lake"),
        ]
        return Target(results=results, log_file=default_log_file(point))
    mounted = section(found.statistics, "mount")
    found.cache_dir, found.read_only = str(mounted["cache_dir"]), bool(mounted["read_only"])
    found.log_file = str(mounted["log_file"])
    found.results = list(mount_health.health(found.statistics, time.time()))
    return found


def _checks(target: Target) -> Iterator[CheckResult]:
    host = Host.this()
    yield from machine_checks.machine(host, platform.release())
    if target.cache_dir:
        of_mount = int(number(target.statistics, "staging", "disk_needed_bytes"))  # by its own --free-space
        needed = of_mount or _FREE_BYTES_MIN + ROOM_BYTES_MIN
        yield from machine_checks.cache_directory(target.cache_dir, needed, host.mountinfo)
        if target.is_named:  # else it is the directory above all default ones, which lists their names only
            yield machine_checks.cache_permissions(target.cache_dir)
    yield from target.results


def _run_diagnosis(target: Target, *, throughput: bool, show: Callable[[CheckResult], None]) -> None:
    """Let the child check the rest. Raises LakeError where it ends without an answer."""

    def show_result(answer: Row) -> None:
        assert isinstance(answer, CheckResult)
        show(answer)

    request = Diagnosis(
        cache_dir=target.cache_dir, store=target.store, read_only=target.read_only, throughput=throughput
    )
    run_child(DIAGNOSIS, request, command="doctor", show=show_result)
