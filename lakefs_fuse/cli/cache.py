"""`lakefs-fuse cache`: which bytes of the lake are on this node, by path.

The commands resolve paths to mounts and ask each daemon over its control socket (`vfs/residency` does the work). A list
of names costs no request to the mount: only the directories in it are resolved.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from lakefs_fuse.cli.daemons import checked_text, locate, open_daemon, require_done, with_reason
from lakefs_fuse.cli.help import SETTINGS, GroupedCommand, argument, option
from lakefs_fuse.cli.parameters import RATE, format_bytes, format_duration
from lakefs_fuse.cli.store_options import json_option
from lakefs_fuse.cli.terminal import Bar, is_watched, print_json, print_tables, progress_bar, table_text
from lakefs_fuse.control import protocol
from lakefs_fuse.control.mounts import read_mounts
from lakefs_fuse.errors import ConfigError, LakeError
from lakefs_fuse.quantity import counted

LINE_S = 10.0
"""Period of progress lines if standard error is not a terminal."""
MAGIC = re.compile(r"[*?[]")

Decorated = TypeVar("Decorated", bound=Callable[..., object])
EVICT_SKIPS = {"pinned_files": "pinned", "open_files": "open or kept by keep-newest, or in a pack with files that are, "
               "or that are pinned", "dirty_files": "not in the store yet"}  # fmt: skip
"""Counts in the answer to `protocol.EvictCache`."""
Selection = dict[str, list[tuple[str, str]]]
"""Paths and globs by mountpoint, as `protocol.SelectPaths` has them."""
Answers = Iterable[tuple[str, dict[str, Any]]]
"""Mountpoints, and what their daemons answer, as it comes."""


@click.group("cache")
def cache() -> None:
    """Fetch files into the local cache ahead of use, keep or evict them, and see what is there.

    \b
      lakefs-fuse cache warm /mnt/lake/imagenet
      lakefs-fuse cache pin /mnt/lake/tokenizer
      lakefs-fuse cache ls '/mnt/lake/imagenet/*'

    PATH is a file or directory in a mount; a directory includes everything below it. A quoted glob is expanded by the
    mount: * and ? stay within a name, ** is any number of directories, and names that begin with a dot need the dot.
    """


def selection_options(command: Decorated) -> Decorated:
    """Add PATH… and the options that select files."""
    command = option(
        "--files-from", metavar="FILE", help="Also the paths in FILE, one a line; - is standard input. They are not "
        "expanded as globs, and relative ones start at the working directory.",
    )(command)  # fmt: skip
    command = option("-0", "--null", is_flag=True, help="Paths in FILE end with NUL instead of newline.")(command)
    return argument("paths", "Files, directories or quoted globs in a mount.", nargs=-1)(command)


limit_option = option(
    "--limit", type=RATE, metavar="RATE", help="Maximum bytes a second from the store, such as 50M.  "
    "[default: no limit]",
)  # fmt: skip
fits_option = option(
    "--as-much-as-fits", is_flag=True, help="If not all files fit into the cache, fetch as many as fit, in the order "
    "of the paths, instead of none.",
)  # fmt: skip
background_option = option(
    "--background", is_flag=True, help="Return when it is known to fit. The daemon continues; `cache ls` and `stats` "
    "show the progress.",
)  # fmt: skip


@cache.command("warm", cls=GroupedCommand, context_settings=SETTINGS)
@selection_options
@limit_option
@fits_option
@background_option
@option("--stop", is_flag=True, help="End the fetches in the background of the mount that PATH is in.")
@json_option
def warm(
    paths: tuple[str, ...],
    files_from: str | None,
    null: bool,
    limit: float | None,
    as_much_as_fits: bool,
    background: bool,
    stop: bool,
    as_json: bool,
) -> None:
    """Fetch files into the cache, so that reading them sends no request to the store.

    Files in the cache are not fetched again: after an interruption, the same command fetches the rest. Ctrl-C ends it.
    If the files do not fit into --cache-size, nothing is fetched, and the exit code is 1. Later, when the cache needs
    room, these files are evicted like others.
    """
    selection = select(paths, files_from, null)
    if stop:
        stopped = ((mountpoint, _stop(mountpoint)) for mountpoint in selection)
        _tell(stopped, lambda point, values: f"{point}: {_number(values, 'stopped')} stopped", as_json=as_json)
        return
    request = protocol.WarmCache(bytes_s_max=rate_of(limit), partial=as_much_as_fits, background=background)
    warm_all(selection, request, as_json=as_json)


@cache.command("pin", cls=GroupedCommand, context_settings=SETTINGS)
@selection_options
@limit_option
@background_option
@json_option
def pin(
    paths: tuple[str, ...], files_from: str | None, null: bool, limit: float | None, background: bool, as_json: bool
) -> None:
    """Fetch files into the cache, and never evict them.

    A pin applies to the path: it pins all files below a directory, including later ones, and the new version of a file
    that is replaced. A glob pins the paths that it matches now. Pins survive restarts of the mount. They may occupy
    three quarters of --cache-size, less the part that keep-newest reserves; if there is no room, nothing is pinned, and
    the exit code is 1.
    """
    request = protocol.WarmCache(bytes_s_max=rate_of(limit), background=background, pin=True)
    warm_all(select(paths, files_from, null), request, as_json=as_json)


@cache.command("unpin", cls=GroupedCommand, context_settings=SETTINGS)
@selection_options
@json_option
def unpin(paths: tuple[str, ...], files_from: str | None, null: bool, as_json: bool) -> None:
    """End the pins at and below paths; their bytes stay in the cache until it needs room.

    PATH need not exist. A path below a pinned directory cannot be unpinned alone.
    """

    selection = select(paths, files_from, null)

    def describe(mountpoint: str, values: dict[str, Any]) -> str:
        pins = values["pins"]
        left = f"{pins['paths']:,} are left, {format_bytes(pins['disk_bytes'])}"
        what = _name_selected(mountpoint, selection[mountpoint])
        return f"{what}: {counted(_number(values, 'unpinned'), 'pin')} ended; {left}"

    _tell(_ask_all(selection, protocol.UnpinCache()), describe, as_json=as_json)


@cache.command("evict", cls=GroupedCommand, context_settings=SETTINGS)
@selection_options
@json_option
def evict(paths: tuple[str, ...], files_from: str | None, null: bool, as_json: bool) -> None:
    """Remove files from the cache, and free their disk space immediately.

    Pinned files, files that are open, and bytes that are not in the store yet stay. A block of 1 MiB of a pack is
    removed with all files in it. The kernel's page cache stays as it is.
    """

    selection = select(paths, files_from, null)

    def describe(mountpoint: str, values: dict[str, Any]) -> str:
        kept = ((_number(values, key), why) for key, why in EVICT_SKIPS.items())
        stay = [f"{counted(count, 'file stays', 'files stay')}: {why}" for count, why in kept if count]
        what = _name_selected(mountpoint, selection[mountpoint])
        evicted = f"{counted(_number(values, 'files'), 'file')} evicted"
        return "\n".join([f"{what}: {evicted}, {format_bytes(_number(values, 'freed_bytes'))} freed", *stay])

    _tell(_ask_all(selection, protocol.EvictCache()), describe, as_json=as_json)


@cache.command("ls", cls=GroupedCommand, context_settings=SETTINGS)
@selection_options
@option("--pinned", is_flag=True, help="Show the pins at and below PATH instead.")
@json_option
def list_cache(paths: tuple[str, ...], files_from: str | None, null: bool, pinned: bool, as_json: bool) -> None:
    """Show how much of each path is in the cache, whether it is pinned, and when it was last used.

    A directory is one line with the sums of the files below it. Bytes that wait for their upload count as local.
    """
    found = _ask_all(select(paths, files_from, null), protocol.ListCache(pinned))
    if as_json:
        _print_json(found)
    else:
        for mountpoint, values in found:
            _print_list(mountpoint, values)


def rate_of(limit: float | None) -> int:
    """Bytes per second as `protocol.WarmCache` has them, of --limit."""
    return max(1, int(limit)) if limit else 0


# -- which files


def select(paths: Sequence[str], files_from: str | None, null: bool) -> Selection:
    """What a command is about. Raises LakeError for a path in no mount, ConfigError for what cannot be a path."""
    if null and files_from is None:
        raise click.UsageError("-0 says how the paths in a file end: give --files-from too")
    selection: Selection = {}
    for path in paths:
        mountpoint, relative, pattern = _locate_glob(path)
        selection.setdefault(mountpoint, []).append((checked_text(relative), checked_text(pattern)))
    for mountpoint, relative in _locate_all(_read_names(files_from, null)) if files_from is not None else ():
        selection.setdefault(mountpoint, []).append((checked_text(relative), ""))
    if not selection:
        raise click.UsageError("no path is given: name files, directories or globs, or give --files-from")
    return selection


def _locate_glob(path: str) -> tuple[str, str, str]:
    """Mountpoint, path in it and glob below that. A path that exists is no glob."""
    magic = MAGIC.search(path)
    if magic is None or os.path.lexists(path):
        return *locate(path), ""
    fixed, slash, rest = path[: magic.start()].rpartition("/")
    pattern = os.path.normpath((rest if slash else path[: magic.start()]) + path[magic.start() :])
    if pattern.startswith(".."):
        raise ConfigError(f"{path}: .. behind a glob: write the path that is meant")
    return *locate(fixed or slash or "."), pattern


def _read_names(file: str, null: bool) -> Iterator[str]:
    try:
        if file == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(file, "rb") as source:
                data = source.read()
    except OSError as error:
        raise ConfigError(f"--files-from {file}: {error.strerror or error}") from error
    for line in data.split(b"\0" if null else b"\n"):
        if line:
            yield os.fsdecode(line)


def _locate_all(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """As `locate`, of many names: each directory is resolved once, and the last component not at all."""
    mountpoints = {mount.mountpoint for mount in read_mounts()}
    known: dict[str, tuple[str, str]] = {}
    for path in names:
        parent, _, name = path.rstrip("/").rpartition("/")
        parent = "/" if path.startswith("/") and not parent else parent or "."
        if name in ("", ".", "..") or os.path.join(parent, name) in mountpoints:
            yield locate(path)
            continue
        if parent not in known:
            known[parent] = locate(parent)
        mountpoint, directory = known[parent]
        yield mountpoint, f"{directory}/{name}" if directory else name


# -- asking


def _ask_all(selection: Selection, request: protocol.CacheRequest) -> Answers:
    return ((mountpoint, _ask(mountpoint, selected, request)) for mountpoint, selected in selection.items())


def _ask(mountpoint: str, selected: list[tuple[str, str]], request: protocol.CacheRequest) -> dict[str, Any]:
    with open_daemon(mountpoint) as client:
        client.select(selected)
        *_, reply = client.follow(request)
    return _values(reply)


def _values(reply: protocol.Reply) -> dict[str, Any]:
    require_done(reply)
    assert isinstance(reply, protocol.Statistics)
    return reply.values


def _stop(mountpoint: str) -> dict[str, Any]:
    with open_daemon(mountpoint) as client:
        client.select([])
        return _values(client.call(protocol.StopWarming()))


def warm_all(selection: Selection, request: protocol.WarmCache, *, as_json: bool) -> None:
    """Fetch, one mount after another, and print the result of each as soon as it is done; with ``as_json`` all results
    at the end."""
    found: list[tuple[str, dict[str, Any]]] = []
    for mountpoint, selected in selection.items():
        values = _warm(mountpoint, selected, request)
        found.append((mountpoint, values))
        if not as_json:
            click.echo(_describe_warm(_name_selected(mountpoint, selected), values, request))
    if as_json:
        _print_json(found)
    if gone := sum(_number(values, "gone_files") for _, values in found):
        files = counted(gone, "file was", "files were")
        raise LakeError(f"{files} replaced or removed in the store during the command: run it again")


def _warm(mountpoint: str, selected: list[tuple[str, str]], request: protocol.WarmCache) -> dict[str, Any]:
    reply: protocol.Reply = protocol.Done()
    with open_daemon(mountpoint) as client:
        client.select(selected)
        with progress_bar(remaining=True) as bar:
            shown = _Shown(bar)
            for reply in with_reason(client.follow(request), mountpoint):
                if isinstance(reply, protocol.Progress):
                    shown.show(reply)
    return _values(reply)


def _name_selected(mountpoint: str, selected: Sequence[tuple[str, str]]) -> str:
    """What a command was about in a mount: its only path, or how many there are."""
    if len(selected) != 1:
        return f"{counted(len(selected), 'path')} in {mountpoint}"
    return os.path.join(mountpoint, *(part for part in selected[0] if part))


def _describe_warm(what: str, values: dict[str, Any], request: protocol.WarmCache) -> str:
    """One line about ``what`` was requested, and another if not all of it fits."""
    files, size, fetched = _number(values, "files"), _number(values, "bytes"), _number(values, "fetched_bytes")
    if request.background:
        missing = f"{counted(files, 'file')}, {format_bytes(size)}"
        return f"{what}: fetching what is missing of {missing}, in the background"
    left_out, gone = _number(values, "left_out_files"), _number(values, "gone_files")
    kept = format_bytes(size - _number(values, "left_out_bytes"))
    there = files - left_out - gone
    is_there = f"{counted(there, 'file')}, {kept}, {'is' if there == 1 else 'are'} in the cache"
    text = f"{what}: {is_there}; {format_bytes(fetched)} fetched"
    if left_out:
        text += f"\n{counted(left_out, 'file')}, {format_bytes(_number(values, 'left_out_bytes'))}, did not fit"
    return text


class _Shown:
    """Progress of a warm: on a bar, or without a terminal as a line at intervals."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._began_s = self._line_s = time.monotonic()
        self._has_told = False

    def show(self, progress: protocol.Progress) -> None:
        if progress.stage == "waiting":
            self._bar.update("waiting for another warm", 0, None, "")
            return
        if progress.stage != "fetching":
            self._bar.update("counting", 0, None, counted(progress.files_total, "file"))
            self._began_s = time.monotonic()
            return
        if progress.unfit_bytes and not self._has_told:
            self._has_told = True
            self._bar.note(f"{format_bytes(progress.unfit_bytes)} do not fit into the cache, and are skipped")
        done = f"{progress.files_total - progress.files_left:,} of {counted(progress.files_total, 'file')}"
        self._bar.update("warming", progress.bytes_done, progress.bytes_total, done)
        now_s = time.monotonic()
        if not is_watched() and now_s - self._line_s >= LINE_S:
            self._line_s = now_s
            rate = progress.bytes_done / max(0.001, now_s - self._began_s)
            left = f", {format_duration((progress.bytes_total - progress.bytes_done) / rate)} left" if rate else ""
            self._bar.note(
                f"{done}, {format_bytes(progress.bytes_done)} of {format_bytes(progress.bytes_total)}, "
                f"{format_bytes(rate)}/s{left}"
            )


def _number(values: dict[str, Any], key: str) -> int:
    return int(values.get(key, 0))


# -- printing


def _tell(found: Answers, describe: Callable[[str, dict[str, Any]], str], *, as_json: bool) -> None:
    if as_json:
        _print_json(found)
    else:
        for mountpoint, values in found:
            click.echo(describe(mountpoint, values))


def _print_json(found: Answers) -> None:
    print_json([{"mountpoint": mountpoint, **values} for mountpoint, values in found])


def _print_list(mountpoint: str, values: dict[str, Any]) -> None:
    from rich.table import Column, Table

    table = Table(Column("path", overflow="fold"), box=None, pad_edge=False)
    for name in ("files", "size", "local", "", "pinned", "last used"):
        table.add_column(name, justify="right")
    for row in values["paths"]:
        size, local = row["bytes"], row["local_bytes"]
        share = "100 %" if local >= size else f"{100 * local / size:.1f} %"
        used = datetime.fromtimestamp(row["used_s"], UTC).isoformat(timespec="seconds") if row["used_s"] else "-"
        path = os.path.join(mountpoint, row["path"]) if row["path"] else mountpoint
        sizes = format_bytes(size), format_bytes(local), share
        table.add_row(table_text(path), f"{row['files']:,}", *sizes, row["pinned"], used)
    print_tables(table)
    pins = values["pins"]
    if pins["paths"]:
        refused = f"; {format_bytes(pins['refused_bytes'])} have no room" if pins["refused_bytes"] else ""
        taken = f"{format_bytes(pins['disk_bytes'])} of {format_bytes(pins['limit_bytes'])}"
        click.echo(f"pins: {pins['paths']:,}, {taken}{refused}")
    warm = values["warm"]
    if warm["running"]:
        click.echo(
            f"warming: {warm['files_done']:,} of {counted(warm['files_total'], 'file')}, "
            f"{format_bytes(warm['fetch_bytes_done'])} of {format_bytes(warm['fetch_bytes_total'])}"
        )
    elif warm["last_error"]:
        click.echo(f"the last warm in the background failed: {warm['last_error']}")
