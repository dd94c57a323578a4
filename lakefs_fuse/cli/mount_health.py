"""What the counters of a mount's daemon mean for `doctor`: backlog, errors, cache, maintenance. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from lakefs_fuse import __version__
from lakefs_fuse.checks import CheckResult, failed, ok, warning
from lakefs_fuse.cli.parameters import format_bytes, format_duration
from lakefs_fuse.cli.stats_values import Values, number, section
from lakefs_fuse.quantity import counted

NAMES_MISSING = (
    "names may be missing, and removed ones seen again, because the index that had collected commits is lost: "
    "`lakefs-fuse fsck` names what to restore; then mount again"
)
OLDEST_S_MAX = 3600.0
"""Age of acknowledged files above which a slow store does not explain the delay."""
NUMBERS_USED_WARN = 0.75
"""Share. Even at 500 packs a second, which use up all numbers in 99 days, three weeks are left."""


def health(values: Values, now_s: float) -> Iterator[CheckResult]:
    """Results from the values of ``stats --json``; ``now_s`` is the time since 1970."""
    yield _daemon(section(values, "daemon"), str(section(values, "mount").get("log_file") or "the journal"))
    if why := why_read_only(values):
        yield warning("mount.features", why)
    yield from _backlog(values)
    yield _requests(section(values, "store"))
    yield _commits(section(values, "commits"))
    for name in ("cache", "staging"):
        if name in values:
            yield _disk(name, section(values, name))
    if "maintenance" in values:
        yield _maintenance(section(values, "maintenance"), now_s)
    yield _kernel(section(values, "kernel"))


def _daemon(daemon: Values, log: str) -> CheckResult:
    check = "mount.daemon"
    restarts, version = number(daemon, "restarts"), str(daemon.get("version", ""))
    text = f"pid {daemon.get('pid')}, up for {format_duration(number(daemon, 'uptime_s'))}"
    if restarts:
        died = counted(restarts, "daemon")
        return warning(check, f"{text}; {died} died before it: see {log}", restarts=int(restarts))
    if version != __version__:
        return warning(check, f"{text}, of version {version}, and this is {__version__}: mount again to upgrade it")
    return ok(check, text, restarts=0)


def why_read_only(values: Values) -> str:
    """Return why a mount cannot write to its lake although its program could to others; empty if it can."""
    unknown = section(values, "mount").get("needs_newer_program")
    names = ", ".join(map(str, unknown)) if isinstance(unknown, list) else ""
    return f"the mount is read-only, as the lake has {names}: install a newer version to write" if names else ""


def _backlog(values: Values) -> Iterator[CheckResult]:
    check, dirty, writeback = "mount.backlog", section(values, "dirty"), section(values, "writeback")
    files, size, refused = number(dirty, "files"), number(dirty, "bytes"), number(dirty, "failed")
    text = f"{counted(files, 'file')}, {format_bytes(size)}, {'is' if files == 1 else 'are'} not in the store"
    counts = {"files": int(files), "bytes": int(size)}
    because = str(writeback.get("waiting_because") or "")
    oldest_s = number(writeback, "oldest_s")
    if refused:
        yield failed(check, f"{text}, and {refused:,.0f} of them failed: `lakefs-fuse stats` says why", **counts)
    elif because:
        yield failed(check, f"{text}, because: {because}", **counts)
    elif oldest_s > OLDEST_S_MAX:
        age = format_duration(oldest_s)
        yield warning(check, f"{text}, the oldest for {age}: `lakefs-fuse stats` lists them", **counts)
    else:
        yield ok(check, text if files else "everything is in the store", **counts)
    orphans = number(dirty, "orphans")
    if orphans:
        yield warning(
            "mount.orphans",
            f"{counted(orphans, 'file was', 'files were')} left unfinished: `lakefs-fuse orphans` lists them, and why",
            orphans=int(orphans),
        )


def _requests(store: Values) -> CheckResult:
    check, requests = "mount.requests", section(store, "requests")
    sent = sum(number(requests, kind) for kind in requests)
    errors, throttled = number(store, "errors"), number(store, "throttled")
    text = f"{counted(sent, 'request')}, {counted(errors, 'error')}, {throttled:,.0f} throttled"
    counts = {"requests": int(sent), "errors": int(errors), "throttled": int(throttled)}
    if store.get("away"):
        return failed(check, f"{text}: the store does not answer, the log says how it fails", **counts)
    if errors:
        return warning(check, f"{text}: the log names them", **counts)
    if throttled:
        return warning(check, f"{text}: lower --requests and --uploads", **counts)
    return ok(check, text, **counts)


def _commits(commits: Values) -> CheckResult:
    check, damaged, future = "mount.commits", number(commits, "damaged"), number(commits, "future")
    if number(commits, "names_missing"):
        return failed(check, NAMES_MISSING)
    if damaged:
        text = f"{counted(damaged, 'commit')} cannot be read: run `lakefs-fuse fsck`"
        return failed(check, text, damaged=int(damaged))
    if future:
        return warning(
            check,
            f"{counted(future, 'commit is', 'commits are')} dated in the future: the log names them and their writers",
            future=int(future),
        )
    if withdrawn := number(commits, "withdrawn"):
        text = f"{counted(withdrawn, 'change')} of names made here gave way to newer versions: the log names them"
        return warning(check, text, withdrawn=int(withdrawn))
    used, used_max = number(commits, "object_numbers"), number(commits, "object_numbers_max")
    if used > NUMBERS_USED_WARN * used_max:
        return warning(
            check,
            f"{used:,.0f} of the {used_max:,.0f} numbers that the lake has for packs and moved objects are used up: "
            "copy its files into a new lake before the last one is",
            object_numbers=int(used),
        )
    return ok(check, f"{counted(number(commits, 'applied'), 'commit')} applied, none left out")


def _disk(name: str, values: Values) -> CheckResult:
    check, state = f"mount.{name}", str(values.get("state", "ok"))
    free, needed = number(values, "disk_free_bytes"), number(values, "disk_needed_bytes")
    if state == "failed":
        return failed(check, f"the disk of the {name} answers with errors: see the kernel's log, and replace it")
    if state == "full" and free < needed:
        return failed(
            check,
            f"the disk of the {name} is full, and writers get ENOSPC: free at least {format_bytes(needed - free)} "
            f"there ({format_bytes(free)} are free), or lower --free-space",
            free_bytes=int(free),
        )
    if state == "full":
        return warning(check, f"the {name} is full: make room on its disk, or raise --{name}-size")
    return ok(check, state)


def _maintenance(maintenance: Values, now_s: float) -> CheckResult:
    check, fold_s = "mount.maintenance", number(maintenance, "last_fold_s")
    last = f"last fold {format_duration(max(0.0, now_s - fold_s))} ago" if fold_s else "no fold yet"
    if maintenance.get("overdue"):
        return warning(check, f"{last}, and overdue: {maintenance.get('overdue_because')}")
    if maintenance.get("mode") == "off":
        return ok(check, "left to other mounts (--maintenance off, or read-only)")
    error = maintenance.get("last_error")
    if error:
        return warning(check, f"{last}; the last run failed: {error}")
    return ok(check, last)


def _kernel(kernel: Values) -> CheckResult:
    check, missing = "mount.kernel", kernel.get("missing")
    if not kernel.get("hooks") and isinstance(missing, list) and missing:
        return warning(check, str(missing[0]))
    return ok(check, f"fast paths are used, libfuse {kernel.get('libfuse', '')}")
