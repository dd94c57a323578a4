"""Makes the parts of a filesystem and joins them, each after those that it needs. Used by `open` only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.commits.applier import Applier
from lakefs_fuse.commits.change_journal import ChangeJournal
from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.hints import Hints
from lakefs_fuse.commits.hybrid_clock import HybridClock
from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.commits.objects.key_claims import KeyClaims
from lakefs_fuse.commits.pack_budget import PackBudget
from lakefs_fuse.commits.pack_rows import PackRows
from lakefs_fuse.commits.path_tree import Relocated, Watcher
from lakefs_fuse.commits.poller import Poller
from lakefs_fuse.config import MountConfig
from lakefs_fuse.environment.hint_channel import HintChannel
from lakefs_fuse.environment.memory_shares import shares_of
from lakefs_fuse.environment.node import Node
from lakefs_fuse.meta.database import Database
from lakefs_fuse.meta.entry import ROOT_INODE, Entry
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.metrics import Metrics, ReadMetrics
from lakefs_fuse.path_rules import Rules
from lakefs_fuse.staging.part_layout import PartLayout
from lakefs_fuse.staging.segments import Segments
from lakefs_fuse.staging.staging_area import Staging
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.upload.uploader import Uploader
from lakefs_fuse.vfs.change_events import ChangeEvents
from lakefs_fuse.vfs.durability import Durability
from lakefs_fuse.vfs.files.block_reader import open_reader
from lakefs_fuse.vfs.files.drafts import Drafts
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.late_objects import LateObjects
from lakefs_fuse.vfs.filesystem import Filesystem
from lakefs_fuse.vfs.lake_size import LakeSizes, NameCount
from lakefs_fuse.vfs.namespace.commit_order import CommitOrder
from lakefs_fuse.vfs.namespace.foreign_objects import ForeignObjects
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.renamed_objects import RenamedObjects
from lakefs_fuse.vfs.ops.attributes import Attributes
from lakefs_fuse.vfs.ops.clone import Clones
from lakefs_fuse.vfs.ops.create import NewFiles
from lakefs_fuse.vfs.ops.directory import Directories
from lakefs_fuse.vfs.ops.handles import Handles
from lakefs_fuse.vfs.ops.incomplete_files import IncompleteFiles
from lakefs_fuse.vfs.ops.io import FileIO
from lakefs_fuse.vfs.ops.link import Links
from lakefs_fuse.vfs.ops.name_changes import NameChanges
from lakefs_fuse.vfs.ops.open_publisher import OpenFilePublisher
from lakefs_fuse.vfs.ops.rename import Renames
from lakefs_fuse.vfs.ops.rename_preparation import RenamePreparation
from lakefs_fuse.vfs.ops.unlink import Unlinker
from lakefs_fuse.vfs.ops.xattr import ExtendedAttributes
from lakefs_fuse.vfs.pinning.pinner import Pinner, Units
from lakefs_fuse.vfs.residency.lake_names import LakeNames
from lakefs_fuse.vfs.residency.pins import PinFile, PinnedChanges, Pins
from lakefs_fuse.vfs.residency.residency import Residency
from lakefs_fuse.vfs.residency.upcoming_reads import UpcomingReads
from lakefs_fuse.vfs.status import Status, cache_section, commit_section, staging_section
from lakefs_fuse.vfs.writeback.group_commit import GroupCommit
from lakefs_fuse.vfs.writeback.object_writer import ObjectWriter
from lakefs_fuse.vfs.writeback.orphans import Orphans
from lakefs_fuse.vfs.writeback.packer import Packer
from lakefs_fuse.vfs.writeback.publisher import Publisher
from lakefs_fuse.vfs.writeback.queue import WriteBackQueue
from lakefs_fuse.vfs.writeback.reconciliation import Reconciliation
from lakefs_fuse.vfs.writeback.replay import Replay
from lakefs_fuse.vfs.writeback.scheduler import PublishScheduler


class FilesWatcher(Watcher):
    """Passes changes by the applier of commits to listings in progress, files in use and the kernel."""

    def __init__(self, namespace: Namespace, files: FileTable) -> None:
        self._namespace, self._files, self.in_use = namespace, files, files.by_inode

    def keeps(self, entry: Entry, *, own: bool) -> bool:
        return self._files.is_dirty(entry) if own else self._files.keeps_name(entry)

    def is_new(self, entry: Entry) -> bool:
        file = self._files.get(entry.inode)
        return file is not None and file.versions[0].is_new

    def redated(self, entry: Entry) -> bool:
        file = self._files.hold(entry.inode)
        if file is None:
            return False
        file.is_redated = True
        return True

    def ctime_ns(self, entry: Entry) -> int:
        file = self._files.get(entry.inode)
        return entry.ctime_ns if file is None else file.entry.ctime_ns

    def changing(self, parent: int, name: bytes) -> None:
        self._namespace.changing(parent, name)

    def changed(self, parent: int, name: bytes) -> None:
        self._namespace.invalidate_name(parent, name)

    def outdated(self, parent: int, name: bytes) -> None:
        self._namespace.outdate(parent, name)

    def updated(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._files.updated(entry)

    def relocated(self, files: Sequence[Relocated]) -> None:
        for file in files:
            self._files.relocated(file)

    def restored(self, entries: Sequence[Entry]) -> None:
        for listener in self._namespace.events.names_restored:
            listener(entries)

    def moved(self, moves: Sequence[tuple[str, str]]) -> None:
        if self._namespace.announced:
            self._namespace.moved(moves)
        self._files.moved()

    def root_changed(self) -> None:
        self._namespace.touch(ROOT_INODE)


@dataclass(frozen=True)
class Ground:
    """The parts on which a filesystem is built: configuration, store client, database, block cache, node."""

    config: MountConfig
    client: StoreClient
    metrics: Metrics
    database: Database
    cache: BlockCache
    nursery: trio.Nursery
    node: Node
    spans: tuple[tuple[int, int], ...]
    hints: HintChannel | None = None

    @property
    def clock_ns(self) -> Callable[[], int]:
        return self.node.clock.wall_ns

    def reader(self, learned: Callable[[ObjectMeta], None]) -> BlockReader:
        return open_reader(self.config, self.client, self.metrics, self.cache, self.nursery, self.node, learned)

    def services(self, reader: BlockReader) -> Uploader:
        config, save = self.config, Journal(self.database).save
        staging = Staging(
            Segments(Path(config.cache_dir).absolute() / "staging", self.node.disk, self.database.sync),
            self.node.threads,
            bytes_max=config.staging_bytes_max,
            free_bytes_min=config.free_bytes_min,
            metrics=self.metrics.upload,
            evict=self.cache.evict,
            wait_s_max=config.staging_timeout_s,
        )
        layout = PartLayout(self.spans, staging_bytes_max=config.staging_bytes_max)
        return Uploader(self.client, reader, staging, layout, self.nursery, self.node.clock, save, config.uploads_max)

    def ids(self, purpose: str) -> Callable[[], str]:
        stream = self.node.random.stream(purpose)
        return lambda: f"{stream.getrandbits(128):032x}"


class Commits:
    """The parts that commit this node's changes of names, and apply those of other nodes."""

    def __init__(self, ground: Ground, namespace: Namespace, watcher: FilesWatcher, events: ChangeEvents) -> None:
        metrics, database, client = ground.metrics.commits, ground.database, ground.client
        node = ground.node
        self.clock = HybridClock(node.clock, rng=node.random.stream("commit-times"))
        writer = f"{node.random.stream('writer').getrandbits(32):08x}"
        self.hints = Hints(
            ground.hints, node.threads, ground.metrics.hints,
            writer=writer, refresh_s=ground.config.refresh_s, rng=node.random.stream("hints"),
            idleness=namespace.idleness,
        )  # fmt: skip
        self.log = log = CommitLog(
            client,
            self.clock,
            node.threads,
            writer=writer,
            publish_hint=self.hints.publish if self.hints.is_used else None,
            budget=PackBudget(ground.config.upload_bytes_s_max, shares_of(ground.config.memory_bytes_max).pack),
            repeats=not ground.config.read_only,
        )
        self.applier = Applier(database, namespace.tree, metrics, watcher, clock_ns=self.clock.wall_ns)
        self.pack_rows = PackRows(namespace.tree.objects, log, node.random.stream("pack-rows"))
        journal = ChangeJournal(database)
        self.deletions = DeletionQueue(
            database, client, namespace.tree, journal, metrics,
            clock_ns=self.clock.wall_ns, delay_s=ground.config.delete_after_s,
        )  # fmt: skip
        self.writeback = WriteBackQueue(
            database, ground.nursery, Rules.of(ground.config), ground.metrics.writeback, self.deletions
        )
        self.committer = Committer(
            log, self.applier, self.deletions, journal, metrics,
            catch_up=self._catch_up, acknowledged=self.writeback,
        )  # fmt: skip
        self.poller = Poller(
            log, self.applier, metrics,
            refresh_s=ground.config.refresh_s, redate=self.committer.redate, applied=events.notify_commit_applied,
            rng=node.random.stream("deep-polls"), hints=self.hints,
        )  # fmt: skip
        self._is_read_only = ground.config.read_only

    async def _catch_up(self, within_s: float) -> None:
        await self.poller.catch_up(within_s)

    async def begin(self) -> None:
        """Reconcile the loaded journal with the store, and apply what other nodes have committed. Raises LakeError."""
        await self.poller.correct_clock()
        await self.committer.reconcile_journal()
        self.clock.follow(self.applier.commits.newest())
        await self.poller.poll()
        if not self._is_read_only and await self.committer.redate_before():
            await self.poller.poll()

    async def read_again(self) -> None:
        """Apply every commit again, so that names that others had covered come back. Raises LakeError."""
        self.applier.commits.forget_all()
        await self.poller.poll()


class Assembly:
    """The parts, joined; `start` begins their tasks. Callers use `filesystem`; the other parts are for inspection."""

    def __init__(self, ground: Ground) -> None:
        self._ground, config, metrics, database = ground, ground.config, ground.metrics, ground.database
        events, threads = ChangeEvents(), ground.node.threads
        tree = Tree(database, events)
        self.files = files = FileTable(database, tree, ground.cache, events)
        self.namespace = namespace = Namespace(
            config, database, tree, ground.client, metrics.namespace, ground.nursery, ground.node.clock, files
        )
        self._commits = commits = Commits(ground, namespace, FilesWatcher(namespace, files), events)
        self.clock, self.committer = commits.clock, commits.committer
        committer = self.committer
        events.objects_listed.append(CommitOrder(tree, commits.poller, namespace.is_announced).objects_listed)
        self.deletions, self.pack_rows = commits.deletions, commits.pack_rows
        reader = ground.reader(events.notify_metadata_read)
        units = Units(config.rules)
        self.pinner = Pinner(
            database, namespace, ground.cache, units, threads,
            is_dirty=files.is_dirty, bytes_max=config.cache_bytes_max // 2,
        )  # fmt: skip
        if units.any:
            events.version_stored.append(self.pinner.published)
            events.path_renamed.append(self.pinner.renamed)
        self.renamed = RenamedObjects(
            namespace, ground.client, committer, self.deletions, ground.nursery, ground.ids("hidden-objects"),
            self.pinner.moved, read_only=config.read_only,
        )  # fmt: skip
        events.commit_applied.append(self.renamed.commit_applied)
        events.names_restored.append(self.renamed.names_restored)
        services = ground.services(reader)
        self.staging = services.staging
        self.writeback = writeback = commits.writeback
        self.drafts = drafts = Drafts(files, services, writeback, ground.ids("draft-ids"))
        self._writer = writer = self._object_writer()
        reconciliation = Reconciliation(namespace, ground.client)
        self.replay = Replay(
            database, namespace, drafts, writeback, reconciliation, writer, metrics.writeback,
            ensure_directory=lambda path: commits.applier.paths.ensure_directory(path, ground.clock_ns()),
        )  # fmt: skip
        group_commit = GroupCommit(database, ground.nursery, threads, ground.node.clock, writeback, committer)
        publisher = Publisher(database, namespace, ground.cache, drafts, writer, writeback, group_commit, threads)
        self._scheduler = PublishScheduler(
            writeback, publisher, self.replay, committer, services.staging, ground.nursery,
            delay_s=config.writeback_delay_s,
        )  # fmt: skip
        self.orphans = Orphans(
            database, namespace, services, writer, writeback, self.replay, read_only=config.read_only,
            in_use=lambda inode: files.hold(inode) is not None,
        )  # fmt: skip
        self._reader, self._group_commit = reader, group_commit
        self.filesystem = self._filesystem(services, publisher)
        events.key_reservations.append(committer.journal.reserved.__contains__)
        if not config.read_only:
            foreign_objects = ForeignObjects(
                namespace, ground.client, committer, self.deletions, ground.nursery, self.poller.poll
            )
            events.object_overridden.append(foreign_objects.add)
            events.commit_applied.append(foreign_objects.commit_applied)

    def _filesystem(self, services: Uploader, publisher: Publisher) -> Filesystem:
        """Make the operations, on the parts that hold state."""
        ground, config, clock, drafts = self._ground, self._ground.config, self._ground.node.clock, self.drafts
        files, namespace, writeback, poll = self.files, self.namespace, self.writeback, self.poller.poll
        incomplete = IncompleteFiles(
            ground.database, namespace, files, services, self.orphans, self._commits.read_again
        )
        late = LateObjects(self._commits.clock.wall_ns, config.store.retry_timeout_s, read_only=config.read_only)
        io = FileIO(namespace, drafts, self._reader, publisher, incomplete, self.renamed, late, poll)
        names = NameChanges(namespace, self.committer, writeback, clock)
        unlinker = Unlinker(ground.database, drafts, io, self._reader, self.committer, writeback, clock)
        preparation = RenamePreparation(
            namespace, files, ground.client, self.poller.catch_up, publisher, writeback, self.renamed,
            config.staging_timeout_s,
        )  # fmt: skip
        renames = Renames(namespace, files, names, self.committer, unlinker, writeback, preparation, self.deletions)
        new_id = ground.ids("clones")
        clones = Clones(namespace, names, renames, preparation, ground.client, self.deletions, new_id)
        attributes = Attributes(config, ground.client, namespace, drafts, io, names, unlinker.inodes, clock)
        links = Links(config.hard_links, namespace, drafts, io, self._writer, writeback, self._reader, attributes.entry)
        rules, metrics = Rules.of(config), ground.metrics

        def reads_of(path: str) -> ReadMetrics:
            return metrics.reads_of(rules.glob_of(path))

        open_publisher = OpenFilePublisher(rules, io.publish, ground.nursery)
        new_files = NewFiles(config, ground.database, namespace, drafts, io, self._group_commit, clock)
        pin_file = PinFile(Path(config.cache_dir).absolute() / "pins", ground.node.disk)
        pins = Pins(LakeNames(namespace, files, fresh=False), ground.cache, pin_file, self.pinner.reserved_bytes_max)
        PinnedChanges(pins, namespace)
        self.residency = Residency(
            LakeNames(namespace, files), self._reader, ground.nursery, ground.clock_ns, metrics.warm, pins,
            UpcomingReads(pins.names, self._reader, ground.nursery, metrics.upcoming), lambda: self.pinner.kept.bytes,
        )  # fmt: skip
        return Filesystem(
            Status(
                ground.metrics, self._sections(), files, self.orphans, self.committer, writeback, clock, self._sizes()
            ),
            namespace,
            attributes,
            ExtendedAttributes(config.store.source, namespace, files, names, writeback),
            Directories(namespace, files, names, unlinker, renames, clones, links, clock),
            Handles(namespace, files, attributes, io, new_files, open_publisher, clock, reads_of),
            Durability(config, files, io, names, writeback, self.orphans, self.deletions, ground.nursery),
            self.residency,
        )

    def _sizes(self) -> LakeSizes:
        ground, namespace = self._ground, self.namespace
        count = NameCount(namespace.tree.usage, ground.nursery)
        return LakeSizes(
            count, ground.client, self.staging, self.writeback, ground.cache, read_only=ground.config.read_only
        )  # fmt: skip

    def _sections(self) -> dict[str, Callable[[], Mapping[str, object]]]:
        """Return the sections of `statistics`."""
        ground, metrics, namespace = self._ground, self._ground.metrics, self.namespace
        objects, reader = namespace.tree.objects, self._reader
        return {
            "store": lambda: {**metrics.store.as_dict(), "away": ground.client.is_away},
            "cache": lambda: cache_section(metrics, ground.cache),
            "reader": lambda: msgspec.to_builtins(reader.statistics()),
            "namespace": lambda: {**msgspec.to_builtins(metrics.namespace), **namespace.statistics()},
            "commits": lambda: commit_section(metrics, self.committer, self.deletions, objects),
            "staging": lambda: staging_section(self.staging, namespace),
            "kept": self.pinner.statistics,
            "warm": self.residency.statistics,
            "pins": self.residency.pins.statistics,
            "upcoming": self.residency.upcoming.statistics,
            "capabilities": lambda: msgspec.to_builtins(ground.client.capabilities),
        }

    def _object_writer(self) -> ObjectWriter:
        ground = self._ground
        packer = Packer(
            ground.database, self.committer, self.namespace, ground.cache, ground.metrics.commits, ground.nursery,
            ground.node.threads, self.files.being_written,
        )  # fmt: skip
        claims = KeyClaims(
            ground.client, self.namespace.tree.tombstones, self.deletions, self.clock, self.committer.flush,
            delete_after_s=ground.config.delete_after_s,
        )  # fmt: skip
        return ObjectWriter(
            self.namespace, self.committer, claims, self.renamed, packer, self.files, ground.config, self.poller.poll
        )  # fmt: skip

    @property
    def poller(self) -> Poller:
        return self._commits.poller

    @property
    def cache(self) -> BlockCache:
        return self._ground.cache

    async def begin(self) -> None:
        """Load the journals, and bring names to the state of the store, except those that orphans hide. Raises
        LakeError."""
        writes = not self._ground.config.read_only
        self.committer.load(announces=writes)  # acknowledged files have the names that renames in the journal gave them
        if writes:
            self.replay.restore()
        self.orphans.drop_names()
        await self._commits.begin()
        self.writeback.sequence = max(self.writeback.sequence, self._commits.committer.journal.newest_after)
        await self.orphans.load()
        if self.orphans.uncovered or self.replay.uncovered:
            await self._commits.read_again()
        await self.pinner.load()

    def close(self) -> None:
        """Journal what is staged. The database is still open."""
        self.drafts.close()

    def start(self) -> None:
        """Start the tasks that run for as long as the mount lives."""
        nursery = self._ground.nursery
        nursery.start_soon(self._commits.poller.run)
        nursery.start_soon(self._commits.hints.run)
        nursery.start_soon(self.pinner.run)
        nursery.start_soon(self.residency.run)
        if self._ground.config.mountpoint:  # `gc` and `fsck` rely on these rows in their views
            nursery.start_soon(self.pack_rows.run)
        if not self._ground.config.read_only:
            nursery.start_soon(self._scheduler.run)
            nursery.start_soon(self._commits.committer.run)
            nursery.start_soon(self._commits.committer.run_announcements)
            nursery.start_soon(self._commits.log.run)
            nursery.start_soon(self._commits.deletions.run, self.poller.catch_up)
