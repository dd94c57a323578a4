"""Waits for the daemon of an earlier mount, which stores the remaining files, before a new mount starts.

A daemon outlives its mount: after `umount` it uploads and closes its database, and then its supervisor ends. Until then
the supervisor holds the lock of the mountpoint, and the daemon that of the cache directory. A mount that still exists
is an immediate error. *No process is stopped* here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from lakefs_fuse.cli.daemons import follow
from lakefs_fuse.config import MountConfig
from lakefs_fuse.control import protocol
from lakefs_fuse.control.client import connect
from lakefs_fuse.control.mounts import mount_at
from lakefs_fuse.control.supervision import Process, cache_lock_holder, supervisor_of
from lakefs_fuse.errors import LakeError, MountError

CLOSING_S_MAX = 60.0
"""Time for a process that reports no progress: it opens a lake, or closes its database."""
DETACHED_S_MIN = 2.0
"""A daemon that serves for this time without a mount has open files, and may never end."""
CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a lock that the mount needs, and the mountpoint that it serves or served."""

    pid: int
    mountpoint: str
    what: str


def find_holder(config: MountConfig) -> Holder | None:
    """The supervisor of the mountpoint, or else the daemon on the cache directory; None if neither runs."""
    supervisor = supervisor_of(config.mountpoint, os.geteuid())
    if supervisor is not None:
        with supervisor:
            return Holder(supervisor.pid, config.mountpoint, f"the mountpoint {config.mountpoint}")
    held = cache_lock_holder(Path(config.cache_dir))
    if held is not None and held[1]:
        return Holder(*held, f"the cache directory {config.cache_dir}")
    return None


def wait_for_predecessor(config: MountConfig, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
    """Return when no process holds the mountpoint or the cache directory.

    Raises MountError where that may never be: a mount exists, or was detached in use, or a process does not end."""
    is_reported = False
    silent_since_s = serving_since_s = None
    while (holder := find_holder(config)) is not None:
        if mount_at(holder.mountpoint) is not None:
            raise MountError(
                f"{holder.what} is in use by the mount at {holder.mountpoint} (pid {holder.pid}): "
                f"`lakefs-fuse umount {holder.mountpoint}` first, or choose another"
            )
        if not is_reported:
            click.echo(f"waiting for the daemon that served {holder.mountpoint} before (pid {holder.pid})", err=True)
            is_reported = True
        now_s = monotonic_s()
        answer = _ask(holder)
        if answer is not None and answer.draining:
            silent_since_s = serving_since_s = None
        elif answer is not None and not answer.starting:
            serving_since_s = serving_since_s if serving_since_s is not None else now_s
            if now_s - serving_since_s > DETACHED_S_MIN:
                raise MountError(
                    f"{holder.what} is in use by a mount at {holder.mountpoint} that was detached while its files were "
                    f"open: its daemon (pid {answer.pid}) ends when they are closed"
                )
        else:
            silent_since_s = silent_since_s if silent_since_s is not None else now_s
            if now_s - silent_since_s > CLOSING_S_MAX + config.store.retry_timeout_s:
                raise MountError(
                    f"{holder.what} is in use by pid {holder.pid}, which served {holder.mountpoint} and does not end: "
                    "its log says why"
                )
        _wait_end(holder.pid)


def _ask(holder: Holder) -> protocol.Hello | None:
    """The reply of its daemon, if it drains after the drain; None if it does not answer."""
    hello = None
    try:
        client = connect(holder.mountpoint)
        if client is not None:
            with client:
                hello = client.hello()
                if hello.draining:
                    ending = client.follow(protocol.WaitEnd())
                    follow(ending, what="finishing", deadline_s=float("inf"), mountpoint=holder.mountpoint)
    except LakeError:
        pass  # It ended just now, or hangs. Bytes that it could not store stay in staging for the next daemon.
    return hello


def _wait_end(pid: int) -> None:
    try:
        with Process(pid) as process:
            process.wait(CHECK_S)
    except ProcessLookupError:
        pass
