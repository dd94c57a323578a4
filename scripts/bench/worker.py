"""Runs a job in a process of its own, and ends it when its time is over.

Processes come from multiprocessing's fork server, which has loaded torch and boto3 before: that takes seconds and is
not timed. A job looks at the clock itself; one that hangs in a system call of a mount is killed with all that it
started. Used from one thread.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec

from scripts.bench.results import Latency

GRACE_S = 4.0
"""A job that looks at the clock may be so late."""
PRELOAD = ["torch", "torch.utils.data", "boto3", "boto3.s3.transfer", "obstore", "obstore.store", "scripts.bench.jobs"]
CONTEXT = multiprocessing.get_context("forkserver")


def preload() -> None:
    """Before the first job: what is loaded once for all of them."""
    CONTEXT.set_forkserver_preload(PRELOAD)


class Outcome(msgspec.Struct, frozen=True):
    """What a job did, by its own clock."""

    seconds: float
    operations: int
    bytes: int = 0
    latency: Latency | None = None
    stopped: bool = False
    each: list[int] = []
    """Of jobs with several readers: operations of each."""


class Job(Protocol):
    """Travels to the process that runs it."""

    @property
    def limit_s(self) -> float: ...

    def run(self) -> Outcome: ...


class JobFailed(Exception):
    """What it raised."""


def _child(connection: Connection, job: Job) -> None:
    os.setsid()
    try:
        answer = msgspec.msgpack.encode(job.run())
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        answer = msgspec.msgpack.encode(f"{type(error).__name__}: {error} ({last.name})")
    connection.send_bytes(answer)


def run(job: Job) -> Outcome:
    """What it did; where it had to be killed, nothing, stopped at its limit. Raises JobFailed."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_child, args=(theirs, job))
    process.start()
    theirs.close()
    try:
        if not ours.poll(job.limit_s + GRACE_S + preparing_s(job)):
            return Outcome(job.limit_s, 0, stopped=True)
        told = msgspec.msgpack.decode(ours.recv_bytes(), type=Outcome | str)
    except EOFError as error:
        raise JobFailed("the process that did it ended") from error
    finally:
        _end(process.pid)
        process.join(GRACE_S)
        ours.close()
    if isinstance(told, str):
        raise JobFailed(told)
    return told


def preparing_s(job: Job) -> float:
    """How long it may take before its clock begins."""
    return float(getattr(job, "preparing_s", 2.0))


def _end(pid: int | None) -> None:
    """The job's session, whatever it started."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
