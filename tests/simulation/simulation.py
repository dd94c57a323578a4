"""Runs a plan: nodes, users, faults; compares what all nodes show after each round, and asks the oracle about it.

What always holds: the oracle learns of a change before the product does, and that it is certain after the product has
said so. An operation whose node dies, or that fails with an error of the store, may have happened.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast
from unittest.mock import patch

import trio

from lakefs_fuse.admin.commands import run_fsck, run_gc, run_maintenance, run_pack, run_relocate, run_snapshot
from lakefs_fuse.admin.maintenance import GRACE_DAYS, INTERVALS_PER_DAY
from lakefs_fuse.admin.work import Work
from lakefs_fuse.blockcache import cache_directory
from lakefs_fuse.commits.index import levels
from lakefs_fuse.commits.record import Operation, Remove
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.daemon.ingest_command import run_ingest
from lakefs_fuse.environment import failpoints
from lakefs_fuse.environment.node import Node, RandomStreams
from lakefs_fuse.errors import FileError, LakeError, Unavailable
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.metrics import StoreMetrics
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.lake_record import LakeRecord
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.ops.attributes import AttributeChange
from lakefs_fuse.vfs.ops.rename import RENAME_EXCHANGE
from tests.simulation import plan as plans
from tests.simulation import scheduler
from tests.simulation.chance import Chance
from tests.simulation.lake_reader import Lake as RawLake
from tests.simulation.lake_reader import Reader, StoredObject
from tests.simulation.machine import MachineClock, MachineThreads
from tests.simulation.memory_engine import MemoryEngines
from tests.simulation.network import Killed, Link, Weather
from tests.simulation.node import STORE, NodeDown, SimulatedDisk, SimulatedNode, World
from tests.simulation.object_store import COMMITS, SimulatedStore
from tests.simulation.oracle import DIRECTORY, PROGRAM, Oracle, Removal, Version, describe
from tests.simulation.other_programs import OtherPrograms
from tests.simulation.plan import Plan, Step
from tests.simulation.trace import Commits
from tests.simulation.views import Views

READ_BYTES = 1 << 17
FILTER_BYTES = 1 << 16
"""Of a node's block cache, which has few blocks; each daemon writes its filter to the disk when it ends."""
NOT_DONE = frozenset(
    {"ENOENT", "EEXIST", "ENOTEMPTY", "EISDIR", "ENOTDIR", "EINVAL", "EPERM", "EBUSY", "ENAMETOOLONG", "ELOOP"}
)
"""Errors of an operation that has done nothing."""
FLUSHES_MAX = 8
USERS_S_MAX = 3600.0
SETTLED_S_MAX = 600.0
CLEAN_S_MAX = 600.0
CLEAN_REFRESH_S = 30.0
"""How often nodes poll while they only wait for what is to be deleted."""
CLOCKS_APART_S = 1.37e-7
"""No two machines' clocks agree to the nanosecond, as those of two nodes without an offset would in virtual time."""
WATCH_PAUSE_S = 0.05
COMPARISONS_MAX, COMPARISON_PAUSE_S = 3, 30.0
"""What is still being copied or deleted in the background may show a directory a little longer."""
ADMIN = "admin"
"""What the senders of commands beside the mounts are called, with a number."""
INCREMENTS_MAX, INCREMENTS_SHARE = 4, 4.0
"""Of an index in levels; a lake of few names would have hardly any increment."""
COMMITS_MAX = 8
"""After so many, maintenance folds them into an index."""
MAINTENANCE_INTERVALS = GRACE_DAYS * INTERVALS_PER_DAY
"""In the grace period of the collections of maintenance."""
INGEST = "ingest"
"""The node that stands for runs of `ingest`, for the oracle."""
INGESTED_S = 1_600_000_000
"""The time of what they load."""
TREES_MAX, TREE_PAUSE_S = 3, 3.0
"""A tree is read again where a directory vanished meanwhile."""


class Failed(Exception):
    """The simulation found something wrong."""


@dataclass
class Outcome:
    """What a run was, for reports and for comparing two runs."""

    plan: Plan
    failure: str = ""
    history: list[str] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    """By kind and result."""
    met: Counter[str] = field(default_factory=Counter)
    """Operations on a name that another node had changed in the same round, by kind."""
    known: Counter[str] = field(default_factory=Counter)
    """Defects that are known, see `oracle`."""
    requests: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0


@dataclass
class _Call:
    """An operation under way."""

    number: int
    versions: list[Version] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)
    doubtful: set[Version | Removal] = field(default_factory=set)
    """What another node may have undone before."""
    shown_before: int = 0
    """How many versions the node had shown at the path of a read when it began."""
    has_begun: bool = False
    """Bytes were written: an error says no more that nothing happened, as a later flush may publish them."""

    @property
    def changes(self) -> list[Version | Removal]:
        return [*self.versions, *self.removals]

    def confirm(self) -> None:
        for change in self.changes:
            change.is_certain = change.is_certain or change not in self.doubtful

    def withdraw(self) -> None:
        """Nothing of it has happened, unless it had begun."""
        for change in self.changes:
            change.is_withdrawn = not change.is_certain and not self.has_begun


class Simulation:
    """One run of a plan, in a running loop of `scheduler.run`."""

    def __init__(
        self, plan: Plan, scratch: Path, *, is_tracing: bool = False, is_strict: bool = False,
        is_on_rocksdb: bool = False,
    ) -> None:  # fmt: skip
        self.plan, self._scratch = plan, scratch
        self._engines = None if is_on_rocksdb and not plan.forgets else MemoryEngines()
        self.outcome = Outcome(plan)
        self._clock = MachineClock()
        self.store = SimulatedStore(_capabilities(plan), self._clock.wall_ns)
        self.oracle = Oracle(
            deletes_conditionally=self.store.capabilities.delete_if_match,
            is_strict=is_strict or plan.profile == "turns",
            last_remover=self._last_remover,
            is_copy=self._is_copy,
            is_made=lambda path: self._commits.is_directory_made(path, self._ever_committed()),
            is_moved=lambda old, new: self._commits.is_directory_moved(old, new, self._ever_committed()),
        )
        self.store.arrived = self._arrived
        self.store.deleted_unseen = lambda key, data: self.oracle.deleted_unseen.add((key, data))
        self._views = Views(self.oracle)
        self._nodes: list[SimulatedNode] = []
        self._pending: dict[tuple[str, int, int], Version] = {}
        """What a file that is not in the store yet will be: by node, life and inode."""
        self._scopes: dict[str, set[trio.CancelScope]] = defaultdict(set)
        self._changed_by: dict[str, set[str]] = defaultdict(set)
        self._ended_at: dict[int, int] = {}
        """By operation that succeeded: the last one that had begun when it ended."""
        self._synced: dict[str, int] = {}
        """By node: the last write-back write that was acknowledged. What ended before it began survives a power cut."""
        self._linked: set[Version] = set()
        self._bytes_ever: set[bytes] = {b""}
        self._reader, self._commits = Reader(), Commits()
        self._lake_read: tuple[int, RawLake] | None = None
        """What was read last, when so many changes had been made to the store."""
        self._others = OtherPrograms(self.store, self.oracle, self.read_lake, self._is_renamed)
        self._number = 0
        self._fresh = 0
        self._plain: set[str] = set()
        """Files that are objects at their own keys, as the raw store was read last."""
        if is_tracing:
            self.store.trace = lambda line: self.tell("store", line)

    def tell(self, who: str, what: str) -> None:
        """A line of the history."""
        what = what.replace(str(self._scratch), "SCRATCH")  # its name is another one in each run
        self.outcome.history.append(f"{trio.current_time():10.4f} {who:8} {what}")

    async def run(self) -> Outcome:
        """Never raises for what it finds: that is `Outcome.failure`."""
        try:
            async with trio.open_nursery() as nursery:
                try:
                    await self._run(nursery)
                finally:
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            found, rest = group.split(Failed)
            if found is None or (rest is not None and rest.split((trio.Cancelled, Killed))[1] is not None):
                raise
            self.outcome.failure = str(_first(found))
        self.outcome.virtual_s = trio.current_time()
        self.outcome.requests = self.store.requests
        self.outcome.known = self.oracle.known
        self.outcome.met.update({f"oracle: {rule}": count for rule, count in self.oracle.met.items()})
        return self.outcome

    async def _run(self, nursery: trio.Nursery) -> None:
        plan = self.plan
        self.world = World(self.store, nursery, plan.seed, self._scratch, plan.config, self.outcome.fired)
        self.world.engines, self.world.forgets = self._engines, plan.forgets
        self.calm = Weather(latency_s=plan.latency_s)
        for number, node_plan in enumerate(plan.nodes):
            clock = MachineClock(node_plan.offset_s + number * CLOCKS_APART_S, node_plan.drift)
            node = SimulatedNode(self.world, f"n{number}", clock, **node_plan.config)
            node.weather, node.flips_blocks = self.calm, plan.profile == "crash"
            node.unanswered = partial(self.oracle.disturbed.add, node.name)
            node.died += [partial(self._drop_users, node.name), node.unanswered]
            node.names_changed.append(partial(self._follow, node))
            self._nodes.append(node)
            await node.start()
        self.oracle.begin({}, [PROGRAM, INGEST, *(node.name for node in self._nodes)])
        for part in plan.rounds:
            await self._round(part)
        await self._check_clean()

    def _follow(self, node: SimulatedNode, *_: object) -> None:
        """What a node has not published yet goes along when another node renames a directory above it."""
        for key in list(self._pending):
            if key[:2] != (node.name, node.lives) or node.daemon is None:
                continue
            version, path, under_way = self._pending_in(node, key[2]), node.path_of(key[2]), None
            while version is not None and not version.is_certain and version.path != path:
                under_way, version = version, version.origin  # this node's own rename goes on, and may fail
            if version is None or not version.is_certain:
                continue
            entry = None if path is None else node.entry(path)
            if entry is not None and node.stored_bytes(entry) is not None:
                continue  # it is in the store, as the version of its old name
            if path is not None and path != version.path and node.is_unsaid(path):
                moved = self.oracle.put(path, version.data, node.name, self._shown(node, path), origin=version)
                moved.is_certain, moved.is_plain, version.is_certain = True, version.is_plain, False
                if under_way is None:
                    self._pending[key] = moved
                else:
                    under_way.origin = moved

    def _arrived(self, key: str, data: bytes) -> None:
        """A request with a version came to the store."""
        name, _, life = self.store.sender.partition("#")
        node = next((each for each in self._nodes if each.name == name), None)
        if node is None or node.daemon is None or life != str(node.lives) or (name, data) in self.oracle.applied:
            return
        entry = None if key.startswith(RESERVED_PREFIX) else node.entry(key)
        applied = None if entry is None else node.row_bytes(entry)
        self.oracle.applied[name, data] = set() if applied is None else {applied}

    def _drop_users(self, name: str) -> None:
        for scope in self._scopes[name]:
            scope.cancel()

    # -- rounds

    async def _round(self, part: plans.Round) -> None:
        self._changed_by.clear()
        by_user: dict[tuple[int, int], list[Step]] = defaultdict(list)
        began_s = trio.current_time()
        if self.plan.profile == "turns":
            for step in part.steps:
                await self._user([step], began_s)
                await self._hear(part.quiet_s)
        else:
            async with trio.open_nursery() as nursery:
                for step in part.steps:
                    if isinstance(step.op, plans.FAULTS):
                        nursery.start_soon(self._fault, step, began_s)
                    else:
                        by_user[step.node, step.user].append(step)
                for steps in by_user.values():
                    nursery.start_soon(self._user, steps, began_s)
        await self._settle(part.quiet_s)

    async def _user(self, steps: list[Step], began_s: float) -> None:
        for step in steps:
            await trio.sleep_until(max(began_s + step.at_s, trio.current_time()))
            with trio.move_on_after(USERS_S_MAX) as scope:
                await self._step(step)
            if scope.cancelled_caught:
                raise Failed(f"{_name_of(step.op)} has not ended within {USERS_S_MAX:g} s")

    async def _step(self, step: Step) -> None:
        op = step.op
        self._number += 1
        if isinstance(op, plans.FOREIGN):
            self._foreign(op)
            return
        node, call = self._nodes[step.node], _Call(self._number)
        if isinstance(op, plans.Read):
            call.shown_before = self._views.count(node.name, op.path)
        self.tell(node.name, f"#{call.number} {_name_of(op)}")
        failpoints.HOOK.set(node._reached)  # noqa: SLF001
        result = "dead"
        with trio.CancelScope() as scope:
            self._scopes[node.name].add(scope)
            try:
                with ungrouped():
                    await self._operation(node, op, call)
                result = "ok"
            except NodeDown:
                result = "down"
                call.withdraw()
            except Killed:
                pass
            except LakeError as error:
                result = errno.errorcode.get(error.errno, "EIO")
                if result in NOT_DONE:
                    call.withdraw()
                    self._follow(node)  # what another node's rename moved while a rename of it here was under way
                self._note_error(node, op, call, result)
            finally:
                self._scopes[node.name].discard(scope)
        if result == "ok":
            call.confirm()
            self._ended_at[call.number] = self._number
            self._count_as_synced(node, op, call)
        self.tell(node.name, f"#{call.number} {result}")
        self._count(op, node.name, result)

    def _count(self, op: plans.AnyOp, who: str, result: str) -> None:
        """For the outcome: what was done, and whether it met what another did."""
        what = f"{type(op).__name__} {result}"
        self.outcome.operations[what] += 1
        for path in _paths_of(op):
            if self._changed_by[path] - {who}:
                self.outcome.met[what] += 1
            if result == "ok" and not isinstance(op, plans.Read | plans.List):
                self._changed_by[path].add(who)

    def _foreign(self, op: plans.ForeignPut | plans.ForeignDelete) -> None:
        """Another program's request, which takes effect at once."""
        if isinstance(op, plans.ForeignPut):
            data = plans.content_bytes(op.content, op.size)
            self._bytes_ever.add(data)
            result = self._others.put(op.path, data, self._number)
        else:
            result = self._others.delete(op.path, self._number)
        self.tell(PROGRAM, f"#{self._number} {_name_of(op)}: {result}")
        self._count(op, PROGRAM, result)

    def _note_error(self, node: SimulatedNode, op: plans.AnyOp, call: _Call, result: str) -> None:
        """A user is told of an error. Raises Failed where there is no reason for it."""
        if isinstance(op, plans.Read) and not op.pause_s and result in ("ENOENT", "ESTALE"):
            self._views.show(node.name, op.path, b"!" + result.encode(), call.shown_before)
        is_creation = isinstance(op, plans.Write) and op.how == "exclusive" and call.has_begun
        if is_creation and result == "EEXIST":
            (created,) = _paths_of(op)
            paths = {created, *(moved.path for version in call.versions for moved in version.moved_on())}
            if not any(self._views.has_other_writer(node.name, path) for path in paths):
                raise Failed(f"{node.name} fails to close {created} with EEXIST, and nobody else created it")

    async def _operation(self, node: SimulatedNode, op: plans.AnyOp, call: _Call) -> None:
        match op:
            case plans.Write():
                await self._write(node, op, call)
            case plans.Truncate():
                await self._truncate(node, op, call)
            case plans.Rename():
                await self._rename(node, op, call)
            case plans.Copy():
                await self._copy(node, op, call)
            case plans.Unlink():
                await self._unlink(node, op, call)
            case plans.Mkdir():
                async with self._changing(node, op.path, call) as (path, parent, name):
                    self._put(call, node, path, DIRECTORY, self._shown(node, path))
                    await node.lake.fs.mkdir(parent, name, 0o755, os.getuid(), os.getgid())
            case plans.Rmdir():
                async with self._changing(node, op.path, call) as (path, parent, name):
                    self._remove(call, node, path, self._shown(node, path))
                    await node.lake.fs.rmdir(parent, name)
            case plans.Symlink():
                async with self._changing(node, op.path, call) as (path, parent, name):
                    self._put(call, node, path, b"-> " + op.target.encode(), self._shown(node, path))
                    await node.lake.fs.symlink(parent, name, op.target.encode(), os.getuid(), os.getgid())
            case plans.Chmod():
                async with self._attributed(node, op.path, call) as inode:
                    await node.lake.fs.setattr(inode, AttributeChange(mode=op.mode))
            case plans.SetXattr():
                async with self._attributed(node, op.path, call) as inode:
                    await node.lake.fs.set_xattr(inode, "user.simulation", op.value.encode())
            case plans.Read():
                await self._read(node, op.path, call, op.pause_s)
            case plans.List():
                await node.lake.names(op.path)
            case plans.Watch():
                await self._watch(op)
            case plans.Admin():
                await self._admin(node, op, call)
            case plans.Ingest():
                await self._ingest(op, call)
            case _:
                raise AssertionError(op)

    # -- what the oracle is told

    @asynccontextmanager
    async def _changing(self, node: SimulatedNode, path: str, call: _Call) -> AsyncIterator[tuple[str, int, bytes]]:
        """The path that a name really has when its directory is locked, which may have moved since it was looked up.
        Where it moves on while the name is changed, what happened to which name is in doubt. Raises LakeError."""
        async with node.directory(path) as (parent, name):
            await node.lake.fs.lookup(parent, name)
            begun = node.path_in(parent, name)
            if begun is None:
                raise FileError(errno.ENOENT, path)
            yield begun, parent, name
            ended = node.path_in(parent, name)
            if ended != begun:
                self._doubt_place(node, call, begun, ended)

    def _doubt_place(self, node: SimulatedNode, call: _Call, begun: str, ended: str | None) -> None:
        """A directory moved under an operation: it was at one of two paths."""
        for change in call.changes:
            call.doubtful.add(change)
            if ended is None or not change.path.startswith(begun):
                continue
            path = ended + change.path[len(begun) :]
            if isinstance(change, Version):
                call.doubtful.add(self._put(call, node, path, change.data, frozenset(), origin=change.origin))
            else:
                named = frozenset(self.oracle.versions.get(path, ())) | change.named
                call.doubtful.add(self._remove(call, node, path, named, is_rename=change.is_rename))

    def _shown(self, node: SimulatedNode, path: str) -> frozenset[Version]:
        entry = node.entry(path)
        if entry is None:
            return frozenset()
        shown = self._versions_of(node, path, entry)
        if not shown and (data := node.stored_bytes(entry)) is not None:
            shown = self.oracle.follow(path, data)
        self.oracle.observe(node.name, path, shown)
        return shown

    def _versions_of(self, node: SimulatedNode, path: str, entry: Entry) -> frozenset[Version]:
        if entry.is_dir:
            return self.oracle.matching(path, DIRECTORY)
        data = node.stored_bytes(entry)
        pending = self._pending_in(node, entry.inode)
        while pending is not None and pending.path != path and pending.origin is not None and not pending.is_certain:
            pending = pending.origin  # the rename that is to move it goes on, and may fail
        if pending is not None and pending.path == path and (data is None or data == pending.data):
            return frozenset({pending})
        return self.oracle.matching(path, data) if data is not None else frozenset()

    def _pending_in(self, node: SimulatedNode, inode: int) -> Version | None:
        """What a file will be once it is in the store, at the path to which the last rename that succeeded moved it."""
        version = self._pending.get((node.name, node.lives, inode))
        while version is not None and version.is_withdrawn:
            version = version.origin
        return version

    def _put(
        self, call: _Call, node: SimulatedNode, path: str, data: bytes, shown: frozenset[Version],
        origin: Version | None = None,
    ) -> Version:  # fmt: skip
        version = self.oracle.put(path, data, node.name, shown, origin=origin, operation=call.number)
        version.removals_before |= self._renames_seen(node, path)
        self._bytes_ever.add(data)
        call.versions.append(version)
        return version

    def _renames_seen(self, node: SimulatedNode, path: str) -> frozenset[Removal]:
        """Renames of a path by others that the node has applied: it shows what they moved under the new name. Another
        version may be at the path all the same."""
        return frozenset(
            removal
            for removal in self.oracle.removals.get(path, ())
            if removal.is_rename and removal.is_certain and removal.node != node.name
            for version in removal.named
            for moved in version.moved_to
            if moved.operation == removal.operation and (entry := node.entry(moved.path)) is not None
            if self._versions_of(node, moved.path, entry) == {moved}  # and no other of equal bytes
        )

    def _remove(
        self, call: _Call, node: SimulatedNode, path: str, named: frozenset[Version], *, is_rename: bool = False
    ) -> Removal:
        removal = self.oracle.remove(path, node.name, named, is_rename=is_rename, operation=call.number)
        entry = node.entry(path)
        removal.is_plain = entry is not None and entry.is_plain
        call.removals.append(removal)
        return removal

    @contextmanager
    def _watched(self, node: SimulatedNode, path: str, changed: Callable[[], None]) -> Iterator[None]:
        """Call back whenever the name, or one below it, means something else on the node."""
        paths = {path.encode()}

        def listener(parent: int, name: bytes) -> None:
            components = node.lake.fs.namespace.tree.path(parent) if parent != 1 else []
            where = b"/".join([*(components or []), name])
            if where in paths or where.startswith(path.encode() + b"/"):
                changed()

        node.names_changed.append(listener)
        try:
            yield
        finally:
            node.names_changed.remove(listener)

    # -- operations on files

    @asynccontextmanager
    async def _opened(
        self, node: SimulatedNode, op: plans.Write | plans.Truncate, register: Callable[[str, frozenset[Version]], None]
    ) -> AsyncIterator[tuple[int, int]]:
        """The file of a write, open, and its inode; one user of a node at a time. Raises LakeError."""
        fs, creates = node.lake.fs, isinstance(op, plans.Write) and op.how in ("new", "exclusive")
        for _ in range(4):
            entry = await node.lake.lookup(op.path)
            if entry is None:
                if not creates:
                    raise FileError(errno.ENOENT, op.path)
                async with node.directory(op.path) as (parent, name):
                    if (await fs.lookup(parent, name))[0] is not None:
                        continue
                    path = node.path_in(parent, name)
                    if path is None:
                        raise FileError(errno.ENOENT, op.path)
                    register(path, self._shown(node, path))
                    how = os.O_EXCL if isinstance(op, plans.Write) and op.how == "exclusive" else os.O_TRUNC
                    try:
                        handle, created = await fs.create(
                            parent, name, 0o644, os.O_RDWR | os.O_CREAT | how, os.getuid(), os.getgid()
                        )
                    except FileError as error:
                        if error.errno != errno.ESTALE:
                            raise
                        continue  # another node has made it meanwhile
                    lock = node._lock(-created.inode)  # noqa: SLF001
                    await lock.acquire()
                    node.writers[created.inode] += 1
                try:
                    yield handle, created.inode
                finally:
                    lock.release()
                return
            if isinstance(op, plans.Write) and op.how == "exclusive":
                raise FileError(errno.EEXIST, op.path)
            if entry.is_symlink:
                raise FileError(errno.ELOOP, op.path)  # which the kernel follows, so that it opens no symbolic link
            async with node.writing(entry.inode):
                now = await node.lake.lookup(op.path)
                if now is None or now.inode != entry.inode:
                    continue
                register(op.path, self._shown(node, op.path))
                flags = os.O_RDWR | (os.O_TRUNC if creates else 0)
                try:
                    handle = await fs.open(entry.inode, flags)
                except FileError as error:
                    if error.errno != errno.ESTALE:
                        raise
                    continue
                yield handle, entry.inode
                return
        raise FileError(errno.ESTALE, op.path)

    @asynccontextmanager
    async def _attributed(self, node: SimulatedNode, path: str, call: _Call) -> AsyncIterator[int]:
        """The inode of a file whose attributes are set. The commit puts a symbolic link as a whole, also where another
        node renames or removes it. Raises LakeError."""
        entry = await node.lake.found(path)
        if not entry.is_symlink:
            yield entry.inode
            return
        async with self._changing(node, path, call) as (real, _parent, _name):
            now = node.entry(real)
            if now is None or now.inode != entry.inode:
                raise FileError(errno.ESTALE, path)
            self._put(call, node, real, b"-> " + node.lake.fs.readlink(now.inode), self._shown(node, real))
            yield now.inode

    async def _write(self, node: SimulatedNode, op: plans.Write, call: _Call) -> None:
        new = plans.content_bytes(op.content, op.size)
        version: Version | None = None
        shown: frozenset[Version] = frozenset()
        path, creates = op.path, op.how in ("new", "exclusive")

        def register(real: str, found: frozenset[Version]) -> None:
            nonlocal version, shown, path
            call.withdraw()
            call.versions.clear()
            path, shown = real, found
            if creates:
                version = self._put(call, node, path, new, shown)
                version.is_exclusive = op.how == "exclusive"

        async with self._opened(node, op, register) as (handle, inode):
            key = (node.name, node.lives, inode)
            fs, is_closed = node.lake.fs, False
            file = fs.files_in_use.get(inode)
            try:
                data, at = bytearray(), 0
                if op.how in ("append", "patch"):
                    data = bytearray(await self._read_handle(node, handle))
                    self._check_bytes(node, path, bytes(data))
                    at = len(data) if op.how == "append" else op.content % (len(data) + 1)
                    whole = bytes(data[:at]) + new + bytes(data[at + len(new) :])
                    version = self._put(call, node, path, whole, shown)
                assert version is not None
                self._pending[key] = version
                step = -(-len(new) // op.pieces) or 1
                for piece in range(op.pieces):
                    part = new[piece * step : (piece + 1) * step]
                    call.has_begun = True
                    await fs.write(handle, at + piece * step, part)
                    data[at + piece * step : at + piece * step + len(part)] = part
                    if op.fsyncs and piece + 1 < op.pieces:
                        between = self._put(call, node, path, bytes(data), shown)
                        between.known -= {version}
                        version.known, version.shown = version.known | {between}, version.shown | {between}
                        await fs.fsync(handle)
                        self._confirm_write(node, call, between, inode, file)
                        self.oracle.seen[node.name, path].add(between)
                        shown |= {between}
                    if op.pause_s:
                        await trio.sleep(op.pause_s)
                is_closed = True
                await node.close(handle)
                self._confirm_write(node, call, version, inode, file)
            except LakeError:
                self._bytes_ever.add(bytes(data))  # other users of the node see what was written before
                pending = self._pending.get(key)
                is_pending = pending is not None and version in (pending, *pending.origins())
                if pending is not None and is_pending and bytes(data) != pending.data:
                    self._pending[key] = self._put(call, node, pending.path, bytes(data), shown)
                if not is_closed:
                    call.has_begun = call.has_begun or creates
                    with _ignored():
                        await node.close(handle)
                raise

    def _confirm_write(
        self, node: SimulatedNode, call: _Call, version: Version, inode: int, file: OpenFile | None
    ) -> None:
        """The user was told that a file is written, under whatever name it has by now."""
        if file is not None and file.unlinked:
            call.doubtful.add(version)
            return  # it has none
        moved = version
        while later := [each for each in moved.moved_to if each.node == node.name and not each.is_withdrawn]:
            moved = later[-1]
        path = node.path_of(inode) or (file.key if file is not None else None)
        if path is not None and path != moved.path and self._may_show(node, path, version.data):
            synced = [later for each in version.shown for later in each.moved_to if later.node == node.name]
            before = frozenset(later for later in synced if later.path == path and not later.is_withdrawn)
            if any(each.data == version.data for each in self.oracle.versions.get(path, ())):
                before = self._shown(node, path) or before  # what it shows there is this, else
            shown = before  # a rename moved what had been synced, and this is in place of it
            moved = self.oracle.put(path, version.data, node.name, shown, origin=version)
        elif path is not None and path != moved.path:  # what a later commit has put there may be replaced by this yet
            self.oracle.put(path, version.data, node.name, self._shown(node, path), origin=version)
        entry = node.entry(moved.path)
        may_become_plain = file is not None and bool(file.versions)  # what it becomes is seen when it is stored
        moved.is_plain = entry is not None and (not entry.place or may_become_plain)
        self.oracle.acknowledge(moved)
        if moved is not version:
            call.doubtful.add(version)
            key = (node.name, node.lives, inode)
            if self._pending.get(key) is version:
                self._pending[key] = moved
        elif entry is not None and entry.inode == inode:
            self._views.show(node.name, moved.path, moved.data)

    def _may_show(self, node: SimulatedNode, path: str, data: bytes) -> bool:
        """A node has these bytes at a path, unless a later commit has put others there."""
        entry = node.entry(path)
        return entry is None or node.stored_bytes(entry) in (None, data)

    async def _truncate(self, node: SimulatedNode, op: plans.Truncate, call: _Call) -> None:
        shown: frozenset[Version] = frozenset()
        path = op.path

        def register(real: str, found: frozenset[Version]) -> None:
            nonlocal shown, path
            path, shown = real, found

        async with self._opened(node, op, register) as (handle, inode):
            file = node.lake.fs.files_in_use.get(inode)
            data = await self._read_handle(node, handle)
            self._check_bytes(node, path, data)
            cut = data[: op.size].ljust(op.size, b"\0")
            version = self._pending_in(node, inode)
            if len(data) != op.size:
                version = self._put(call, node, path, cut, shown)
                self._pending[node.name, node.lives, inode] = version
                call.has_begun = True
            try:
                await node.lake.fs.setattr(inode, AttributeChange(size=op.size))
            finally:
                await node.close(handle)
            # To the size that the file has, it stores nothing: its close says that what is being written is stored.
            if version is not None and version.data == cut and not version.is_certain:
                self._confirm_write(node, call, version, inode, file)

    async def _read_handle(self, node: SimulatedNode, handle: int) -> bytes:
        pieces, at = [], 0
        while piece := bytes(await node.lake.fs.read(handle, at, READ_BYTES)):
            pieces.append(piece)
            at += len(piece)
        return b"".join(pieces)

    async def _read(self, node: SimulatedNode, path: str, call: _Call, pause_s: float) -> None:
        seen = set(self.oracle.seen[node.name, path])  # an open file keeps its version, whatever is seen meanwhile
        handle, inode = await node.open(path, os.O_RDONLY)
        is_written, writers = self._is_written(node, inode), node.writers[inode]
        try:
            if pause_s:
                await trio.sleep(pause_s)
            data = await self._read_handle(node, handle)
        finally:
            await node.close(handle)
        if is_written or self._is_written(node, inode) or node.writers[inode] != writers:
            return
        self._check_bytes(node, path, data)
        found = self.oracle.matching(path, data)
        if pause_s:  # what was opened may be older than what the node shows by now
            return
        self._views.show(node.name, path, data, call.shown_before)
        if found and all(any(each in newer.known for newer in seen if newer.data != data) for each in found):
            raise Failed(f"{node.name} reads {describe(data)} at {path} after a newer version")
        self.oracle.observe(node.name, path, found)

    async def _watch(self, op: plans.Watch) -> None:
        until_s, changes = trio.current_time() + op.seconds, -1
        while trio.current_time() < until_s:
            now = sum(self.store.requests[each] for each in ("put", "complete", "copy", "delete"))
            if now != changes:
                changes, tree = now, self._read_raw()
                if (op.then in tree) is not op.is_gone and op.first not in tree:
                    gone = "is gone" if op.is_gone else "is there"
                    raise Failed(f"the store has no {op.first} yet, but {op.then}, which changed after it, {gone}")
            await trio.sleep(WATCH_PAUSE_S)

    def _is_written(self, node: SimulatedNode, inode: int) -> bool:
        """Another user of the node may be writing the file, and sees what is not published."""
        file = node.lake.fs.files_in_use.get(inode)
        return file is not None and (file.draft is not None or node._lock(-inode).locked())  # noqa: SLF001

    def _check_bytes(self, node: SimulatedNode, path: str, data: bytes) -> None:
        if data not in self._bytes_ever:
            raise Failed(f"{node.name} reads bytes at {path} that nobody wrote: {describe(data)}")

    async def _unlink(self, node: SimulatedNode, op: plans.Unlink, call: _Call) -> None:
        async with self._changing(node, op.path, call) as (path, parent, name):
            removal = self._remove(call, node, path, self._shown(node, path))

            def changed() -> None:
                removal.named |= self._shown(node, path)

            with self._watched(node, path, changed):
                await node.lake.fs.unlink(parent, name)
            if removal.is_plain:
                removal.named |= self._hidden(node, path) - removal.known

    def _hidden(self, node: SimulatedNode, path: str) -> frozenset[Version]:
        """What a removal took that a listing had brought just before: a node tells of names before their rows are
        written."""
        tombstone = node.lake.fs.namespace.tree.tombstones.get(path.encode())
        data = None if tombstone is None else self.store.versions.get((path, tombstone.etag))
        return frozenset() if data is None else self.oracle.matching(path, data)

    async def _rename(self, node: SimulatedNode, op: plans.Rename, call: _Call) -> None:
        async with node.two_directories(op.old, op.new) as (parent, name, target, renamed):
            fs = node.lake.fs
            entry, _ = await fs.lookup(parent, name)
            await fs.lookup(target, renamed)
            begun = node.path_in(parent, name), node.path_in(target, renamed)
            if entry is None or None in begun:
                raise FileError(errno.ENOENT, op.old)
            old_path, new_path = str(begun[0]), str(begun[1])
            _refuse_loop(old_path, new_path)
            moves = [(old_path, new_path)] + ([(new_path, old_path)] if op.flags & RENAME_EXCHANGE else [])
            moves = [] if old_path == new_path else moves
            registered: set[tuple[str, Version]] = set()

            def register() -> None:
                for old, new in moves:
                    for path in (old, *node.below(old), *node.below(old, directories=True)):
                        self._register_move(node, call, path, new + path[len(old) :], registered)

            is_moved = entry.is_dir and old_path != new_path and not self._is_writeback
            closed = self._views.closed_below(old_path) if is_moved else []
            register()

            def changed() -> None:
                # What was exchanged looks like what is to be, and a file is seen that a renamed directory has hidden.
                if len(moves) == 1 and self._is_directory(node, old_path) == entry.is_dir:
                    register()

            with self._watched(node, old_path, changed):
                await fs.rename(parent, name, target, renamed, op.flags)
            ended = node.path_in(parent, name), node.path_in(target, renamed)
            # What was closed below it meanwhile goes where its directory is now.
            places = [(old_path, ended[0], ended[1] or new_path), (new_path, ended[1], ended[0] or old_path)]
            moves = [
                (old, new)
                for begun_at, ended_at, new in places[: len(moves)]
                for old in dict.fromkeys((begun_at, ended_at))
                if old is not None
            ]
            for old, new in moves:
                made = [new + path[len(old) :] for path in list(self.oracle.versions) if path.startswith(old + "/")]
                files = node.below(new) if self._is_directory(node, new) else [new]
                for path in [*files, *(path for path in made if self._is_directory(node, path))]:
                    self._register_moved(node, call, old + path[len(new) :], path, registered)
            for version, removal in zip(list(call.versions), list(call.removals), strict=True):
                there = node.entry(version.path)
                shown = frozenset() if there is None else self._versions_of(node, version.path, there)
                if version not in shown and self._is_met(call, removal.path, version.path):
                    call.doubtful |= {version, removal}
                if version.origin is not None and not version.origin.is_certain:
                    call.doubtful.add(version)  # it is still being written, or its node died
            if begun == ended and not op.flags & RENAME_EXCHANGE:
                self._views.renamed(node.name, call.number, old_path, new_path, closed)
            if begun != ended:
                self._doubt_move(node, call, (old_path, new_path), ended)
            if entry.is_dir and op.flags & RENAME_EXCHANGE and self._is_met(call, old_path, new_path):
                self._doubt_exchange(call, old_path, new_path)

    async def _copy(self, node: SimulatedNode, op: plans.Copy, call: _Call) -> None:
        """A put of the bytes that the source has meanwhile: which of them is seen afterwards."""
        async with node.two_directories(op.old, op.new) as (parent, name, target, copied):
            fs = node.lake.fs
            entry, _ = await fs.lookup(parent, name)
            await fs.lookup(target, copied)
            old, new = node.path_in(parent, name), node.path_in(target, copied)
            if entry is None or entry.is_dir or old is None or new is None:
                raise FileError(errno.ENOENT, op.old)
            if op.how == "link" and entry.is_symlink:
                raise FileError(errno.EPERM, op.old)
            registered: dict[bytes, Version] = {}

            def register() -> None:
                moved = node.path_of(entry.inode) if op.how == "link" else None
                source = moved or old  # a link is of the file, whatever its name is by now
                row = node.entry(source)
                data = None if row is None else node.stored_bytes(row)
                found = {version.data for version in self._shown(node, source)} if data is None else {data}
                for each in sorted(found - set(registered)):
                    registered[each] = self._put(call, node, new, each, self._shown(node, new))
                    registered[each].is_exclusive = op.how == "link"
                    self._linked |= {registered[each]} if op.how == "link" else set()

            async with node.writing(entry.inode):  # else what was written so far is stored, and copied
                register()
                with self._watched(node, old, register):
                    await self._copy_file(node, op, entry.inode, (old, new), (target, copied))
            register()
            made = node.entry(new)
            data = None if made is None else node.stored_bytes(made)
            if data not in registered:
                call.doubtful |= set(registered.values())
            call.doubtful |= {version for each, version in registered.items() if each != data}
            if (old, new) != (node.path_in(parent, name), node.path_in(target, copied)):
                call.doubtful |= set(registered.values())
            elif op.how == "link":
                self._check_alone(node, new)

    async def _copy_file(
        self, node: SimulatedNode, op: plans.Copy, inode: int, paths: tuple[str, str], target: tuple[int, bytes]
    ) -> None:
        if op.how == "link":
            await node.lake.fs.link(inode, *target)
        else:
            await node.lake.fs.clone(*paths, force=op.how == "force")

    def _check_alone(self, node: SimulatedNode, path: str) -> None:
        """No other node has linked a name that nobody has taken away, or created it with O_EXCL as a plain object: a
        packed file replaces what it finds, and under write-back O_EXCL asks the store for nothing. Raises Failed."""
        above = {path[:at] for at, mark in enumerate(path + "/") if mark == "/"}
        if any(self.oracle.removals.get(each) for each in above):
            return
        acknowledging = {each.name for each in self._nodes if self._durability_of(each) == "writeback"}
        for other in self.oracle.versions.get(path, ()):
            if other not in self._linked and (other.node in acknowledging or self._is_packed(other)):
                continue
            if other.is_exclusive and other.is_certain and other.node != node.name:
                raise Failed(f"{node.name} and {other.node} have both linked {path}")

    def _is_renamed(self, key: str) -> bool:
        """A node has the bytes of another name at this key."""
        running = (node for node in self._nodes if node.daemon is not None)
        return any(node.lake.fs.namespace.tree.objects.used(key) is not None for node in running)

    def _is_packed(self, version: Version) -> bool:
        """Its node has the file in a pack."""
        node = next((each for each in self._nodes if each.name == version.node), None)
        if node is None or node.daemon is None:
            return False
        entry = node.entry(version.path)
        if entry is None or node.row_bytes(entry) != version.data:
            return False
        extent = node.lake.fs.namespace.extent(entry)
        return extent is not None and extent.version.key.startswith(COMMITS)

    def _doubt_move(
        self, node: SimulatedNode, call: _Call, begun: tuple[str, str], ended: tuple[str | None, str | None]
    ) -> None:
        """As `_doubt_place`, of a rename with two directories."""
        for change in call.changes:
            call.doubtful.add(change)
            for before, after in zip(begun, ended, strict=True):
                if after is not None and change.path.startswith(before):
                    path = after + change.path[len(before) :]
                    if isinstance(change, Version):
                        call.doubtful.add(self._put(call, node, path, change.data, frozenset(), origin=change.origin))
                    else:
                        named = frozenset(self.oracle.versions.get(path, ())) | change.named
                        call.doubtful.add(self._remove(call, node, path, named, is_rename=True))

    def _doubt_exchange(self, call: _Call, *paths: str) -> None:
        """Another node moves one of two directories that are exchanged: what is below them may be at either path, and
        an exchange of both by each node brings all of it back."""
        call.doubtful.update(call.changes)
        known: tuple[Mapping[str, list[Version]] | Mapping[str, list[Removal]], ...]
        known = self.oracle.versions, self.oracle.removals
        for changes in known:
            for path, some in changes.items():
                if any(path == each or path.startswith(each + "/") for each in paths):
                    for change in some:
                        change.is_certain = False

    def _is_met(self, call: _Call, *paths: str) -> bool:
        """Others changed a path, or a directory above it, in this round, or are about to."""
        above = {path[:at] for path in paths for at, mark in enumerate(path + "/") if mark == "/"}
        return any(
            change.operation not in (call.number, -1) and not change.is_withdrawn
            for path in above
            for change in (*self.oracle.versions.get(path, ()), *self.oracle.removals.get(path, ()))
        )

    def _is_directory(self, node: SimulatedNode, path: str) -> bool:
        entry = node.entry(path)
        return entry is not None and entry.is_dir

    def _register_move(
        self, node: SimulatedNode, call: _Call, old: str, new: str, registered: set[tuple[str, Version]]
    ) -> None:
        entry = node.entry(old)
        shown = self._shown(node, old)
        if entry is not None and not shown and (data := node.row_bytes(entry)) is not None:
            shown = self.oracle.carrying(old, data)  # of what is being written, too, if it came here with a rename
        if entry is not None and entry.is_dir and not shown:
            self._register_implied(node, call, old, new)
        if entry is None or not shown or any((old, version) in registered for version in shown):
            return
        registered |= {(old, version) for version in shown}
        first = min(shown, key=lambda version: version.number)
        if self._pending_in(node, entry.inode) is first and not first.is_certain:
            # What is being written moves here only; for others the version moves that is in the store.
            for version in list(self.oracle.versions[old]):
                if version is not first and not version.is_withdrawn:
                    shown |= {version}
                    call.doubtful.add(self._put(call, node, new, version.data, frozenset(), origin=version))
                    call.doubtful.add(self._remove(call, node, old, shown, is_rename=True))
        moved = self._put(call, node, new, first.data, self._shown(node, new), origin=first)
        self._remove(call, node, old, shown, is_rename=True)
        if self._pending_in(node, entry.inode) in shown:
            self._pending[node.name, node.lives, entry.inode] = moved

    def _register_implied(self, node: SimulatedNode, call: _Call, old: str, new: str) -> None:
        """A directory is moved that was there only because another program put something into it, or that a node made
        when it removed that: now it is made."""
        if all(version.operation != call.number for version in self.oracle.versions.get(new, ())):
            call.doubtful.add(self._put(call, node, new, DIRECTORY, self._shown(node, new)))
            call.doubtful.add(self._remove(call, node, old, frozenset(), is_rename=True))

    def _register_moved(
        self, node: SimulatedNode, call: _Call, old: str, new: str, registered: set[tuple[str, Version]]
    ) -> None:
        """What was moved although the node did not show it when the rename began."""
        entry = node.entry(new)
        if entry is None:
            return
        pending = self._pending_in(node, entry.inode)
        data = DIRECTORY if entry.is_dir else node.stored_bytes(entry)
        shown, there = self._versions_of(node, new, entry), frozenset[Version]()
        mine = {v for v in self.oracle.versions[old] if v.data == data and v.node == node.name and not v.is_withdrawn}
        if mine and shown and all(version.data != data for version in shown):
            found = frozenset(mine)  # and not what another node put there, which this one polled during the rename
        elif any(moved in shown and data in (None, moved.data) for moved in call.versions):
            if data is None and pending is not None:
                self._register_taken(node, call, old, new, pending, node.row_bytes(entry))
            return
        elif pending is not None and pending.path == old and data in (None, pending.data):
            found = frozenset({pending})
        elif data is not None:
            found = self.oracle.matching(old, data)
            left = {version for removal in call.removals if removal.path == new for version in removal.named}
            there = self.oracle.matching(new, data).difference(call.versions, left)
            if there.difference(*([*version.origins(), *version.moved_to] for version in found)):
                return  # it was there; what had come from there has gone back, or another's rename has moved it, too
        else:
            return
        first = sorted(found, key=lambda version: version.number)[:1]
        for version in first if data == DIRECTORY else found:  # a directory is one, however often it was made
            registered.add((old, version))
            moved = self._put(call, node, new, version.data, frozenset(), origin=version)
            removal = self._remove(call, node, old, found, is_rename=True)  # one of them
            if there and data != DIRECTORY:
                call.doubtful |= {moved, removal}  # perhaps it was put under the new name, and only goes to the old one
            if version is pending:
                self._pending[node.name, node.lives, entry.inode] = moved

    def _register_taken(
        self, node: SimulatedNode, call: _Call, old: str, new: str, pending: Version, data: bytes | None
    ) -> None:
        """A file that was created with O_EXCL moves, and with it what another node had put at its name: its row has
        these bytes. They get the new name, and the file is kept beside them."""
        if data is None or not any(each.is_exclusive for each in pending.origins()):
            return
        for version in self.oracle.matching(old, data):
            if version.node != node.name and all(moved.operation != call.number for moved in version.moved_to):
                call.doubtful.add(self._put(call, node, new, version.data, frozenset(), origin=version))
                call.doubtful.add(self._remove(call, node, old, frozenset({version}), is_rename=True))

    # -- other programs

    def _work_beside(self, call: _Call, path: str = "") -> Work:
        """What a command works with on a machine of its own."""
        name = f"{ADMIN}{call.number}"
        chance = Chance(f"{self.plan.seed}/{name}")
        streams, threads = RandomStreams(self.plan.seed, name), MachineThreads(chance)
        link = Link(chance, self.outcome.fired, self.world.announced(name))
        link.weather = self.calm
        client = StoreClient(
            self.store, self.store.capabilities, StoreMetrics(),
            transport=link, clock=self._clock, rng=streams.stream("retries"),
        )  # fmt: skip
        disk = SimulatedDisk(streams.stream("temporary-names"), threads)
        return Work(
            client=client, store=STORE, path=path, progress=lambda _: None, note=lambda _: None,
            node=Node(self._clock, streams, threads, disk, self._engines), scratch=str(self._scratch),
            change_record=_no_record, host=name, process=1, levels=self.plan.levels,
        )  # fmt: skip

    async def _ingest(self, op: plans.Ingest, call: _Call) -> None:
        """Files of a local tree come into the lake in one commit. Raises LakeError."""
        source = self._scratch / f"source{call.number}"
        source.mkdir()
        for below, content, size in op.files:
            data, file = plans.content_bytes(content, size), source / below
            for directory in [each for each in reversed(file.parents) if source in each.parents]:
                directory.mkdir(exist_ok=True)
            file.write_bytes(data)
            os.utime(file, (INGESTED_S, INGESTED_S))
            self._bytes_ever.add(data)
            version = self.oracle.put(f"{op.path}/{below}", data, INGEST, frozenset(), operation=call.number)
            version.removals_before = frozenset()  # it has not looked what is there
            call.versions.append(version)
        above = sorted({str(Path(op.path, below).parent) for below, _, _ in op.files} | {op.path})
        for path in above:
            os.utime(source / Path(path).relative_to(op.path), (INGESTED_S, INGESTED_S))
            call.versions.append(self.oracle.put(path, DIRECTORY, INGEST, frozenset(), operation=call.number))
        done = await run_ingest(self._work_beside(call, op.path), protocol.IngestArgs(source=str(source)))
        shutil.rmtree(source)
        assert not done.exit_code, done.text
        for version in call.versions:
            self.oracle.acknowledge(version)

    async def _admin(self, node: SimulatedNode, op: plans.Admin, call: _Call) -> None:
        """A command, on a machine of its own. Raises LakeError."""
        work = self._work_beside(call)
        match op.what:
            case "gc":
                await run_gc(work, protocol.GcArgs(grace_s=op.grace_s))
            case "pack":
                await run_pack(work, protocol.PackArgs(grace_s=op.grace_s))
            case "unpack":
                await run_pack(work, protocol.PackArgs(back=True))
            case "relocate":
                await run_relocate(work, protocol.RelocateArgs())
            case "snapshot":
                await run_snapshot(work, protocol.SnapshotArgs())
            case "maintenance":
                folded = self._scratch / f"{node.name}-{node.lives}-folded"
                await run_maintenance(work, protocol.MaintenanceArgs(
                    fold_database=str(folded), interval_s=op.grace_s / MAINTENANCE_INTERVALS, commits_max=COMMITS_MAX,
                    may_delete=True,
                ))  # fmt: skip
            case "fsck":
                await run_fsck(work, protocol.FsckArgs())

    # -- faults

    async def _fault(self, step: Step, began_s: float) -> None:
        await trio.sleep_until(began_s + step.at_s)
        node, op = self._nodes[step.node], step.op
        self.tell(node.name, f"fault {_name_of(op)}")
        match op:
            case plans.Kill():
                await self._kill(node, op)
            case plans.Join():
                await self._join(node, op)
            case plans.Cut():
                node.set_weather(node.weather, trio.current_time() + op.seconds)
                if op.seconds > cast("float", self.plan.config.get("delete_after_s", math.inf)):
                    self.oracle.long_away.add(node.name)
            case plans.Storm():
                node.set_weather(
                    Weather(
                        self.plan.latency_s,
                        lost_request=op.lost_request,
                        lost_answer=op.lost_answer,
                        slow_down=op.slow_down,
                        late=op.late,
                        slow_s=op.slow_s,
                        slow_answer_s=op.slow_answer_s,
                        kinds=op.kinds,
                    )
                )
                await trio.sleep(op.seconds)
                node.set_weather(self.calm)
            case plans.ClockJump():
                self.outcome.fired["clock jump"] += 1
                node.clock.offset_s += op.seconds
            case plans.FillDisk():
                if node.daemon is not None:
                    self.outcome.fired["full disk"] += 1
                    disk = node.daemon.disk
                    disk.room = 0
                    await trio.sleep(op.seconds)
                    disk.room = None
            case _:
                raise AssertionError(op)

    async def _kill(self, node: SimulatedNode, op: plans.Kill) -> None:
        if node.daemon is None:
            return
        if op.failpoint:
            node.failpoint, node.loses_power = (op.failpoint, op.count), op.power
            daemon = node.daemon
            with trio.move_on_after(op.down_s + 20.0):
                await daemon.ended.wait()
            node.failpoint = None
            if node.daemon is not None:
                return
        else:
            how = "killed, cache lost" if op.loses_cache else "power cut" if op.power else "killed"
            self.outcome.fired[how] += 1
            node.kill(loses_cache=op.loses_cache, power=op.power)
        if op.loses_cache:
            self._doubt(node)
        elif op.power:
            self._doubt_unsynced(node)
        self.tell(node.name, "dead")
        await trio.sleep(op.down_s)
        if op.again:
            node.failpoint, node.loses_power = (op.again, 1), op.power
        await self._start(node)
        if node.failpoint is not None and op.again:
            await self._kill(node, plans.Kill(down_s=op.down_s, power=op.power, failpoint=op.again))

    async def _join(self, node: SimulatedNode, op: plans.Join) -> None:
        """A mount with an empty cache directory, in place of one of which all is in the store."""
        if node.daemon is None:
            return
        self.outcome.fired["joined"] += 1
        was_disturbed = node.name in self.oracle.disturbed
        node.kill(loses_cache=True)
        if not was_disturbed:
            self.oracle.disturbed.discard(node.name)
        self._views.forget(node.name)
        await trio.sleep(op.seconds)
        await self._start(node)

    def _doubt(self, node: SimulatedNode) -> None:
        """What only the node's disk knew is lost with it."""
        self._views.forget(node.name)
        is_writeback = self._durability_of(node) == "writeback"
        for versions in self.oracle.versions.values():
            for version in versions:
                if version.node == node.name and (
                    is_writeback or version.data == DIRECTORY or version.data[:3] == b"-> "
                ):
                    version.is_certain = False
        for removals in self.oracle.removals.values():
            for removal in removals:
                if removal.node == node.name and (is_writeback or not removal.is_rename):
                    removal.is_certain = False

    def _count_as_synced(self, node: SimulatedNode, op: plans.AnyOp, call: _Call) -> None:
        """A close under write-back that published a version has synced all earlier changes of names."""
        if not isinstance(op, plans.Write) or op.fsyncs or not op.size or node.daemon is None:
            return
        version = call.versions[-1]
        entry = node.entry(version.path)
        if entry is not None and version in self._versions_of(node, version.path, entry):
            self._synced[node.name] = max(call.number, self._synced.get(node.name, 0))

    def _doubt_unsynced(self, node: SimulatedNode) -> None:
        """A power cut takes changes of names that are neither in the store nor before an acknowledged close. Versions
        that were written stay."""
        is_writeback = self._durability_of(node) == "writeback"
        synced = self._synced.get(node.name, 0) if is_writeback else 0

        def is_lost(change: Version | Removal) -> bool:
            return change.node == node.name and self._ended_at.get(change.operation, self._number) >= synced

        for path, versions in self.oracle.versions.items():
            for version in versions:
                is_moved = version.origin is not None and version.operation != -1
                is_name = version.data == DIRECTORY or version.data[:3] == b"-> " or (is_moved and is_writeback)
                if is_name and is_lost(version):
                    version.is_certain = False
                    self.oracle.seen[node.name, path].discard(version)
        for removals in self.oracle.removals.values():
            for removal in removals:
                if (is_writeback or not removal.is_rename) and is_lost(removal):
                    removal.is_certain = False

    @property
    def _is_writeback(self) -> bool:
        """Some node acknowledges what is not in the store."""
        return any(self._durability_of(node) == "writeback" for node in self._nodes)

    def _durability_of(self, node: SimulatedNode) -> object:
        number = int(node.name[1:])
        return {**self.plan.config, **self.plan.nodes[number].config}.get("durability", "close")

    async def _start(self, node: SimulatedNode) -> None:
        while node.daemon is None:
            try:
                with ungrouped():
                    await node.start()
            except NodeDown:
                self.tell(node.name, "dead")
                await trio.sleep(2.0)
            except LakeError as error:
                self.tell(node.name, f"does not start: {error}")
                await trio.sleep(2.0)
        self._bring_back(node)
        self.tell(node.name, "up")

    def _bring_back(self, node: SimulatedNode) -> None:
        """What a node had acknowledged before it died is on its way into the store again, perhaps at another path."""
        for key in [each for each in self._pending if each[0] == node.name and each[1] < node.lives]:
            file = node.lake.fs.files_in_use.get(key[2])
            if file is not None and file.draft is not None:
                self._pending[node.name, node.lives, key[2]] = self._pending.pop(key)
        self._follow(node)

    # -- comparing

    async def _hear(self, quiet_s: float) -> None:
        """All nodes learn of what one did; the oracle is asked about what one of them, in turns, shows."""
        for node in self._nodes:
            await self._flush(node)
        await trio.sleep(quiet_s)
        tree = await self._tree_of(self._nodes[self._number % len(self._nodes)])
        self._ask_oracle(tree)

    async def _flush(self, node: SimulatedNode) -> None:
        for _ in range(FLUSHES_MAX):
            try:
                with ungrouped():
                    await node.lake.fs.make_durable()
                return
            except LakeError as error:
                self.tell(node.name, f"flush: {error}")
            await trio.sleep(5.0)

    async def _settle(self, quiet_s: float) -> None:
        for node in self._nodes:
            node.set_weather(self.calm, 0.0)
            if node.daemon is not None:
                node.daemon.disk.room = None
            await self._start(node)
        with trio.move_on_after(SETTLED_S_MAX) as scope:
            async with trio.open_nursery() as nursery:
                for node in self._nodes:
                    nursery.start_soon(self._flush, node)
        if scope.cancelled_caught:
            raise Failed(f"what nodes have is not durable after {SETTLED_S_MAX:g} s")
        await trio.sleep(quiet_s)
        await self._read_replaced(quiet_s)
        await self._remove_destroyed(quiet_s)
        for _ in range(COMPARISONS_MAX):
            tree, wrong = await self._compare()
            if not wrong:
                break
            self.outcome.met["nodes agreed late"] += 1
            self.tell("all", f"not yet equal: {wrong}")
            await trio.sleep(COMPARISON_PAUSE_S)
        if wrong:
            raise Failed(wrong)
        for node in self._nodes:
            self._follow(node)
        self._note_packed()
        self._ask_oracle(tree)

    def _note_packed(self) -> None:
        """What was acknowledged before it was stored went into a pack, perhaps, or to another key."""
        stored: dict[str, set[bytes]] = defaultdict(set)
        for (key, _), data in self.store.versions.items():
            stored[key].add(data)
        for path, versions in self.oracle.versions.items():
            for version in versions:
                version.is_plain = version.is_plain and version.data in stored[path]

    async def _read_replaced(self, quiet_s: float) -> None:
        """Users read renamed files whose bytes are in no cache, where a node replaced them before it heard of the
        rename, and died, or found another program's object at the new name, which is deleted since: nobody else says
        what they are now."""
        alive = {f"{node.name}#{node.lives}" for node in self._nodes}
        paths = [
            path
            for path, name in self.read_lake().names.items()
            if name.problem
            and name.key != path
            and (sender := self.store.senders.get(name.key, PROGRAM)) != PROGRAM
            and (sender not in alive or self._others.has_deleted(path))
        ]
        if not paths or self.oracle.is_strict:
            return
        for path in paths:
            with suppress(LakeError), ungrouped():
                await self._nodes[0].lake.parts.renamed.adopt(path)
        self.outcome.met["read after its writer died"] += len(paths)
        await trio.sleep(quiet_s)

    async def _remove_destroyed(self, quiet_s: float) -> None:
        """Users read files whose bytes another program replaced before a rename, or deleted. They remove those that
        cannot be read then either."""
        paths = [] if self.oracle.is_strict else self._others.destroyed()
        if not paths:
            return
        node = self._nodes[0]
        for path in paths:
            with suppress(FileError), ungrouped():
                await node.lake.parts.renamed.adopt(path)  # as a read does whose bytes are in no cache
        await trio.sleep(quiet_s)
        for path in self._others.destroyed():
            self.oracle.known["destroyed bytes"] += 1
            self.tell(node.name, f"removes {path}, whose bytes are destroyed")
            removal = self.oracle.remove(path, node.name, frozenset(self.oracle.versions[path]))
            with ungrouped():
                await node.lake.unlink(path)
            removal.is_certain = True
        await self._flush(node)
        await trio.sleep(quiet_s)

    async def _compare(self, except_at: Collection[str] = ()) -> tuple[dict[str, bytes], str]:
        """What the reader of the raw store finds, and how a node or a fresh mount differs from it."""
        trees = {node.name: await self._tree_of(node) for node in self._nodes}
        unpublished = {node.name: node.unpublished() for node in self._nodes}
        first = self._read_raw()
        trees["fresh"] = await self._fresh_tree()
        for who, tree in trees.items():
            if wrong := _difference(tree, first, except_at={*unpublished.get(who, ()), *except_at}):
                return first, f"{who} and the reader of the raw store differ: {wrong}"
        return first, ""

    def _ask_oracle(self, tree: dict[str, bytes]) -> None:
        stored = {(key, data) for (key, _), data in self.store.versions.items()}
        for path, versions in self.oracle.versions.items():
            for version in versions:  # what was acknowledged before it was stored may have become part of a pack
                version.is_plain = version.is_plain and (path, version.data) in stored
        if wrong := self.oracle.check(tree) + self._views.check(tree):
            raise Failed("; ".join(wrong))
        self._changed_by.clear()
        waiting = self._waiting()
        self._pending.clear()
        self.oracle.begin(tree, [PROGRAM, INGEST, *(node.name for node in self._nodes)], plain=self._plain)
        for key, path, data in waiting:
            self._pending[key] = version = self.oracle.put(path, data, key[0], frozenset())
            version.known = frozenset()
            self.oracle.disturbed.add(key[0])

    def _waiting(self) -> list[tuple[tuple[str, int, int], str, bytes]]:
        """Versions that could not be published, and may be later."""
        found = []
        nodes = {node.name: node for node in self._nodes}
        for key, version in self._pending.items():
            node = nodes[key[0]]
            file = node.lake.fs.files_in_use.get(key[2]) if node.lives == key[1] else None
            if file is not None and file.draft is not None:
                found.append((key, file.key, version.data))
        return found

    def _read_raw(self) -> dict[str, bytes]:
        """What the independent reader finds in the raw store. Raises Failed where it finds damage."""
        lake = self.read_lake()
        if lake.refused or lake.refused_indexes:
            raise Failed(f"the reader refuses {lake.refused or lake.refused_indexes}")
        self._plain = {path for path, name in lake.names.items() if name.key == path}
        tree: dict[str, bytes] = {}
        for path, name in lake.names.items():
            if name.kind == "directory":
                tree[path] = DIRECTORY
            elif name.data is None:
                tree[path] = f"!{name.problem}".encode()
            else:
                tree[path] = name.data if name.kind == "file" else b"-> " + name.data
        return tree

    def _newest(self, path: str) -> tuple[str, Operation] | None:
        return self._commits.newest(path, self._ever_committed())

    def _ever_committed(self) -> dict[str, bytes]:
        """Every commit by its key, those too that gc has deleted: what they said is in an index."""
        return {key: data for (key, _), data in self.store.versions.items() if key.startswith(COMMITS)}

    def _is_copy(self, path: str) -> bool:
        is_unpacked = self.store.senders.get(path, "").startswith(ADMIN)
        return path in self.store.objects and (is_unpacked or path in self.store.copies)

    def _last_remover(self, path: str) -> str:
        newest = self._newest(path)
        if newest is None or not isinstance(newest[1], Remove):
            return ""
        return self.store.senders[newest[0]].partition("#")[0]

    def read_lake(self) -> RawLake:
        """What lies in the store, as its documentation has it."""
        if self._lake_read is not None and self._lake_read[0] == self.store.changes:
            return self._lake_read[1]
        objects = {
            key: StoredObject(data, meta.etag, meta.mtime_ns, meta.metadata or {})
            for key, (data, meta) in self.store.objects.items()
        }
        lake = self._reader.read_lake(objects, now_ns=self._clock.wall_ns())
        self._lake_read = None if lake.postponed else (self.store.changes, lake)
        return lake

    async def _fresh_tree(self) -> dict[str, bytes]:
        self._fresh += 1
        node = SimulatedNode(self.world, f"fresh{self._fresh}", MachineClock(), read_only=True)
        node.weather = self.calm
        with ungrouped():
            await node.start()
        tree = await self._tree_of(node)
        daemon = node.daemon
        assert daemon is not None
        daemon.scope.cancel()
        await daemon.ended.wait()
        if self._engines is not None:
            self._engines.forget(daemon.directory)
        shutil.rmtree(daemon.directory, ignore_errors=True)
        return tree

    async def _tree_of(self, node: SimulatedNode) -> dict[str, bytes]:
        """Every name of a node, with a file's bytes; with the error of one that cannot be read."""
        for _ in range(TREES_MAX):
            tree: dict[str, bytes] = {}
            try:
                await self._add_tree(node, 1, "", tree)
                break
            except LakeError as error:
                is_removed = isinstance(error, FileError) and error.errno in (errno.ENOENT, errno.ESTALE)
                if not is_removed and not isinstance(error, Unavailable):  # of a listing that began before
                    raise
                self.tell(node.name, f"reading all names: {error}")
                await trio.sleep(TREE_PAUSE_S)
        else:
            raise Failed(f"{node.name} lists a name twice, or a directory that cannot be opened")
        return tree

    async def _add_tree(self, node: SimulatedNode, inode: int, prefix: str, tree: dict[str, bytes]) -> None:
        lake = node.lake
        entries = await lake.read_directory(inode)
        if len({entry.name for entry in entries}) < len(entries):
            raise FileError(errno.ENOENT, f"{prefix} lists a name twice")
        for entry in entries:
            path = prefix + entry.name.decode()
            if entry.is_dir:
                tree[path] = DIRECTORY
                if lake.fs.is_unlinked(entry.inode):
                    raise FileError(errno.ENOENT, f"{path} (inode {entry.inode}) is listed, and counts as removed")
                await self._add_tree(node, entry.inode, path + "/", tree)
            elif entry.is_symlink:
                tree[path] = b"-> " + lake.fs.readlink(entry.inode)
            else:
                try:
                    with ungrouped():
                        tree[path] = await lake.read(path)
                except LakeError as error:
                    tree[path] = f"!{errno.errorcode.get(error.errno)} {error}".encode()

    async def _check_clean(self) -> None:
        """Nothing is left over on the nodes, and what was deleted in the end was no name's."""
        jumps = (step.op for part in self.plan.rounds for step in part.steps if isinstance(step.op, plans.ClockJump))
        late_s = sum(abs(jump.seconds) for jump in jumps)  # what is due by a clock that was set
        for node in self._nodes:
            node.lake.parts.poller._refresh_s = CLEAN_REFRESH_S  # noqa: SLF001
        with trio.move_on_after(CLEAN_S_MAX + late_s):
            while any(self._left_on(node) for node in self._nodes):
                await trio.sleep(5.0)
        for node in self._nodes:
            if left := self._left_on(node):
                raise Failed(f"{node.name} has not ended after {CLEAN_S_MAX:g} s: {left}")
        await self._settle(COMPARISON_PAUSE_S)

    def _left_on(self, node: SimulatedNode) -> dict[str, int]:
        parts = node.lake.parts
        left = {"deletions": parts.deletions.waiting, "operations": parts.committer.journal.operations}
        return {name: count for name, count in left.items() if count}


def _capabilities(plan: Plan) -> Capabilities:
    able = {"name": "simulated", "put_if_match": True, "complete_if_match": True, "delete_if_match": True}
    return Capabilities(**{**able, **plan.capabilities})  # type: ignore[arg-type]


def _no_record(_: Callable[[LakeRecord | None], LakeRecord]) -> LakeRecord:
    raise AssertionError("the lake record is not part of a simulation")


def _refuse_loop(old: str, new: str) -> None:
    """Refuse what the kernel refuses itself. Raises FileError."""
    if new.startswith(old + "/"):
        raise FileError(errno.EINVAL)
    if old.startswith(new + "/"):
        raise FileError(errno.ENOTEMPTY)


def _paths_of(op: plans.AnyOp) -> tuple[str, ...]:
    if isinstance(op, plans.Rename | plans.Copy):
        return (op.old, op.new)
    return (getattr(op, "path", ""),)


def _name_of(op: plans.AnyOp) -> str:
    fields = {name: value for name in op.__struct_fields__ if (value := getattr(op, name)) not in (False, "", None)}
    return f"{type(op).__name__} {' '.join(f'{name}={value}' for name, value in fields.items())}"


def _difference(found: dict[str, bytes], expected: dict[str, bytes], except_at: Collection[str]) -> str:
    """``except_at``: files of which the node has a version that could not be published, and that its user has to
    write again or to remove."""
    lines = []
    for path in sorted({*found, *expected}.difference(except_at)):
        one, other = found.get(path), expected.get(path)
        if one != other:
            shown = [("nothing" if data is None else describe(data)) for data in (one, other)]
            lines.append(f"{path}: {shown[0]}, not {shown[1]}")
    return "; ".join(lines)


@contextmanager
def ungrouped() -> Iterator[None]:
    """Errors of the block as themselves."""
    try:
        yield
    except BaseExceptionGroup as group:
        lake_error = group.split(LakeError)[0]
        if lake_error is not None and group.split((LakeError, trio.Cancelled))[1] is None:
            raise _first(lake_error) from None
        if group.split(Killed)[0] is not None:  # tasks were side by side when the node died; others may be cancelled
            raise (group.split((Killed, LakeError))[1] or Killed()) from None
        raise


@contextmanager
def _ignored() -> Iterator[None]:
    try:
        yield
    except LakeError:
        pass


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def simulate(plan: Plan, *, is_tracing: bool = False, is_strict: bool = False, is_on_rocksdb: bool = False) -> Outcome:
    """Run a plan, in a memory filesystem. Known defects are failures where ``is_strict``. ``is_on_rocksdb`` has no
    effect where power is cut."""
    root = "/dev/shm" if os.path.isdir("/dev/shm") else None
    logger = logging.getLogger("lakefs_fuse")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    scratch = Path(tempfile.mkdtemp(prefix="simulation-", dir=root))
    try:

        async def main() -> Outcome:
            simulation = Simulation(
                plan, scratch, is_tracing=is_tracing, is_strict=is_strict, is_on_rocksdb=is_on_rocksdb
            )
            return await simulation.run()

        with (
            patch.multiple(cache_directory, PRESENCE_BITS=FILTER_BYTES * 8, PRESENCE_BYTES=FILTER_BYTES),
            patch.multiple(levels, BASE_SHARE=INCREMENTS_SHARE, INCREMENTS_MAX=INCREMENTS_MAX),
        ):
            return scheduler.run(main, plan.seed)
    finally:
        logger.setLevel(level)
        shutil.rmtree(scratch, ignore_errors=True)
