"""Plans: what is done in a simulation, as data. A seed makes one, shrinking drops steps of it, the corpus keeps it.

What always holds: a step means the same whatever other steps there are; times are offsets from the start of its round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec


class Op(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a step does; paths are relative to the root of the lake."""


class Write(Op, frozen=True):
    """Write a file and close it. ``content`` names the bytes, of which there are ``size``.

    ``new`` creates or truncates, ``exclusive`` creates with O_EXCL, ``append`` and ``patch`` read the file first."""

    path: str
    content: int
    size: int
    how: Literal["new", "exclusive", "append", "patch"] = "new"
    pieces: int = 1
    pause_s: float = 0.0
    fsyncs: bool = False


class Truncate(Op, frozen=True):
    path: str
    size: int


class Rename(Op, frozen=True):
    old: str
    new: str
    flags: int = 0


class Copy(Op, frozen=True):
    """Give the bytes of a file another name: by link(2), which one node alone gets, or by `clone`, in place of what is
    there if it is forced."""

    old: str
    new: str
    how: Literal["link", "clone", "force"]


class Unlink(Op, frozen=True):
    path: str


class Mkdir(Op, frozen=True):
    path: str


class Rmdir(Op, frozen=True):
    path: str


class Symlink(Op, frozen=True):
    path: str
    target: str


class Chmod(Op, frozen=True):
    path: str
    mode: int


class SetXattr(Op, frozen=True):
    path: str
    value: str


class Read(Op, frozen=True):
    """Open a file, and read it ``pause_s`` later."""

    path: str
    pause_s: float = 0.0


class List(Op, frozen=True):
    path: str


class Watch(Op, frozen=True):
    """For so long, whoever reads the store finds ``first`` if there is ``then`` (with ``is_gone``: if there is no
    ``then``), because the node has acknowledged ``first`` before."""

    seconds: float
    first: str
    then: str
    is_gone: bool = False


class Admin(Op, frozen=True):
    """A command beside the mounts; `maintenance` with the names that the node keeps of the newest index."""

    what: Literal["gc", "pack", "unpack", "relocate", "snapshot", "fsck", "maintenance"]
    grace_s: float = 0.0


class Ingest(Op, frozen=True):
    """`ingest` of a local tree into the directory ``path``, beside the mounts: ``files`` by their path in it, with
    ``content`` and ``size`` as in `Write`."""

    path: str
    files: tuple[tuple[str, int, int], ...]


class ForeignPut(Op, frozen=True):
    """Another program, of no node, puts a plain object; ``content`` and ``size`` as in `Write`."""

    path: str
    content: int
    size: int


class ForeignDelete(Op, frozen=True):
    """Another program, of no node, deletes a plain object."""

    path: str


class Kill(Op, frozen=True):
    """The daemon dies, and is started again after ``down_s``; at the ``count``-th pass of ``failpoint`` if given. The
    next daemon dies when it comes to ``again``, also while it starts."""

    down_s: float = 1.0
    loses_cache: bool = False
    power: bool = False
    failpoint: str = ""
    count: int = 1
    again: str = ""


class Join(Op, frozen=True):
    """The node is mounted with an empty cache directory so long after the step; until then it has no mount, as it had
    one that was unmounted when everything was in the store."""

    seconds: float


class Cut(Op, frozen=True):
    """No request of the node comes through for so long."""

    seconds: float


class Storm(Op, frozen=True):
    """The network of the node is bad for so long, for requests of ``kinds`` (of all kinds if none is named): each
    arrives ``slow_s`` later, its answer ``slow_answer_s`` later; the rest are probabilities."""

    seconds: float
    lost_request: float = 0.0
    lost_answer: float = 0.0
    slow_down: float = 0.0
    late: float = 0.0
    slow_s: float = 0.0
    slow_answer_s: float = 0.0
    kinds: tuple[str, ...] = ()


class ClockJump(Op, frozen=True):
    """The wall clock of the node is set."""

    seconds: float


class FillDisk(Op, frozen=True):
    """The disk of the node is full for so long."""

    seconds: float


AnyOp = (
    Write | Truncate | Rename | Copy | Unlink | Mkdir | Rmdir | Symlink | Chmod | SetXattr | Read | List | Watch | Admin
    | Ingest | ForeignPut | ForeignDelete | Kill | Join | Cut | Storm | ClockJump | FillDisk
)  # fmt: skip


class Step(msgspec.Struct, frozen=True):
    """``user`` of ``node`` begins at ``at_s`` or when its step before has ended; faults wait for nobody. The node of
    what other programs do is `NOBODY`."""

    at_s: float
    node: int
    user: int
    op: AnyOp


class Round(msgspec.Struct, frozen=True):
    """Steps, and for how long nothing is done after them before everything is compared."""

    steps: tuple[Step, ...]
    quiet_s: float


class NodePlan(msgspec.Struct, frozen=True):
    """A node's clock, and what its mount is told beyond the settings of the lake."""

    offset_s: float = 0.0
    drift: float = 0.0
    config: dict[str, object] = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation. ``config`` is of all mounts, ``capabilities`` differs from a store that can do everything."""

    profile: str
    seed: str
    nodes: tuple[NodePlan, ...]
    rounds: tuple[Round, ...]
    config: dict[str, object] = {}
    capabilities: dict[str, object] = {}
    latency_s: tuple[float, float] = (0.001, 0.03)
    forgets: bool = False
    """Power is cut: disks are models, as storage engines are, that forget what was not synced."""
    levels: bool = False
    """Commands beside the mounts write levels of the index (`index-format-2`)."""
    note: str = ""
    """Of a plan that is kept: what it found."""
    fails: str = ""
    """Of a plan that is expected to fail: what its failure says."""

    @property
    def steps(self) -> int:
        return sum(len(part.steps) for part in self.rounds)


NOBODY = -1
FOREIGN = (ForeignPut, ForeignDelete)
FAULTS = (Kill, Join, Cut, Storm, ClockJump, FillDisk)


def load(path: Path) -> Plan:
    """Read a plan. Raises msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=Plan)


def dump(plan: Plan) -> bytes:
    """A plan as JSON, a step a line or so."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


_PLACES = [b".%06d\n" % at for at in range(1 << 15)]


def content_bytes(content: int, size: int) -> bytes:
    """Bytes of which each 16 say whose they are and where they belong."""
    owner = b"%08d" % content
    return owner.join([b"", *_PLACES[: -(-size // 16)]])[:size]
