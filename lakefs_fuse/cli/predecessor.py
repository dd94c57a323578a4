"""Waits for the daemon that served a mountpoint or a cache directory before, while it stores what is left.

A daemon outlives its mount: after `umount` it uploads and closes its database, and then its supervisor ends. Each holds
a lock meanwhile: the supervisor that of the mountpoint, the daemon that of the cache directory. A mount that is still
there is refused at once, and no process is stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from lakefs_fuse.cli.daemons import follow, wait_exit
from lakefs_fuse.config import MountConfig
from lakefs_fuse.control import protocol
from lakefs_fuse.control.client import ControlClient, connect
from lakefs_fuse.control.mounts import mount_at
from lakefs_fuse.control.supervision import cache_lock_holder, supervisor_of
from lakefs_fuse.errors import LakeError, MountError

CLOSING_S_MAX = 60.0
"""How long a process may take that does not say what it does: one that opens a lake, or closes its database."""
DETACHED_S_MIN = 2.0
"""A daemon that goes on serving for so long without a mount has open files: it may never end."""
CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds what a mount needs, and the mountpoint that it serves or served."""

    pid: int
    mountpoint: str
    what: str


def find_holder(config: MountConfig) -> Holder | None:
    """The supervisor of the mountpoint, else the daemon on the cache directory, if one runs."""
    supervisor = supervisor_of(config.mountpoint, os.geteuid())
    if supervisor is not None:
        supervisor.close()
        return Holder(supervisor.pid, config.mountpoint, f"the mountpoint {config.mountpoint}")
    held = cache_lock_holder(Path(config.cache_dir))
    if held is not None and held[1]:
        return Holder(*held, f"the cache directory {config.cache_dir}")
    return None


def wait_for_predecessor(config: MountConfig, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
    """Return when nothing holds the mountpoint and the cache directory. Raises MountError where that cannot be waited
    for: a mount that is there, one that was detached in use, a process that does not end."""
    told = False
    silent_since_s = serving_since_s = None
    while (holder := find_holder(config)) is not None:
        if mount_at(holder.mountpoint) is not None:
            raise MountError(
                f"{holder.what} is in use by the mount at {holder.mountpoint} (pid {holder.pid}): "
                f"`lakefs-fuse umount {holder.mountpoint}` first, or choose another"
            )
        if not told:
            click.echo(f"waiting for the daemon that served {holder.mountpoint} before (pid {holder.pid})", err=True)
            told = True
        now_s = monotonic_s()
        answer = _ask(holder)
        if answer is not None and answer.draining:
            silent_since_s = serving_since_s = None
            _wait_drained(holder)
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
                    "see its log"
                )
        _wait_end(holder.pid)


@contextmanager
def _connected(holder: Holder) -> Iterator[ControlClient | None]:
    try:
        client = connect(holder.mountpoint)
    except LakeError:
        client = None
    if client is None:
        yield None
        return
    with client:
        yield client


def _ask(holder: Holder) -> protocol.Hello | None:
    with _connected(holder) as client:
        try:
            return None if client is None else client.hello()
        except LakeError:
            return None  # It ended just now, or hangs.


def _wait_drained(holder: Holder) -> None:
    with _connected(holder) as client:
        if client is None:
            return
        try:
            follow(client.follow(protocol.WaitEnd()), what="finishing", deadline_s=float("inf"))
        except LakeError:
            pass  # What it could not store stays in staging, and the next daemon says so.


def _wait_end(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        wait_exit(pidfd, CHECK_S)
    finally:
        os.close(pidfd)
