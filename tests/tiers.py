"""Tiers of the tests, by what a run costs: `check`, `test` and `test-long`. See README.md in this directory.

`conftest.py` marks tests by `is_integration`. Tests that repeat a step take the number from `examples` or `sized`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import PurePath

from hypothesis import settings

INTEGRATION = "integration"
"""Marker of tests that need a mount, a store's server or other processes, or take seconds:
`make check` leaves them out."""
INTEGRATION_DIRECTORIES = frozenset({"bench", "killed", "mount"})
"""Directories whose tests are all integration tests."""
INTEGRATION_MODULES = frozenset(
    {
        "admin/test_datasets.py",
        "admin/test_exclusion.py",
        "admin/test_fold_database.py",
        "admin/test_fsck_concurrent.py",
        "admin/test_gc.py",
        "admin/test_lost_index.py",
        "admin/test_maintenance.py",
        "admin/test_rebind.py",
        "admin/test_repack.py",
        "admin/test_snapshot.py",
        "blockcache/test_admission.py",
        "blockcache/test_prefetch.py",
        "blockcache/test_reader.py",
        "blockcache/test_reader_pieces.py",
        "checkpoints/test_consolidate.py",
        "cli/test_ingest.py",
        "cli/test_lake.py",
        "cli/test_spawn.py",
        "cli/test_umount.py",
        "cli/test_worker.py",
        "commits/test_archive_check.py",
        "commits/test_index_levels.py",
        "commits/test_shallow_polls.py",
        "daemon/test_admin_worker.py",
        "daemon/test_mount_daemon.py",
        "daemon/test_supervisor.py",
        "ingest/test_ingest.py",
        "simulation/test_any_order.py",
        "simulation/test_directed.py",
        "simulation/test_forgetful_disk.py",
        "simulation/test_seeds.py",
        "store/test_cached_gets.py",
        "store/test_rate_limit.py",
        "store/test_s3_errors.py",
        "upload/test_spilled_parts.py",
        "vfs/test_create.py",
        "vfs/test_every_batch.py",
        "vfs/test_model.py",
        "vfs/test_orphans.py",
        "vfs/test_power_cut.py",
        "vfs/test_queue.py",
        "vfs/test_replay.py",
        "vfs/test_writeback_model.py",
        "vfs/test_writeback_order.py",
    }
)
"""Modules that start processes, wait for real time, or take more than four seconds of CPU."""
INTEGRATION_FIXTURES = frozenset({"dev_fuse", "faults", "make_lake", "moto", "rclone", "seaweed"})
"""Fixtures that start a server or need the kernel's FUSE."""
SERVERS = frozenset({"moto", "rclone", "seaweed", "seaweedfs"})
"""Parameters that name a server whose fixture a test asks for while it runs."""

IS_LONG = "LAKEFS_TEST_LONG" in os.environ
"""`make test-long` runs these tests."""
EXAMPLES = 100
"""Examples of a property test that does not choose, as hypothesis has it."""


def sized(short: int, full: int) -> int:
    """A number that a test takes: ``full`` in `make test-long`, ``short`` in the other tiers."""
    return full if IS_LONG else short


def examples(full: int) -> int:
    """Number of examples of a property test: ten times ``full`` in `make test-long`, a quarter in the other tiers."""
    return sized(max(1, full // 4), full * 10)


def load_profile() -> None:
    """Set what every property test starts from. No deadline: the time of an example says how busy the machine is."""
    settings.register_profile("tier", deadline=None, max_examples=examples(EXAMPLES))
    settings.load_profile("tier")


def is_integration(path: PurePath, fixtures: Iterable[str], parameters: Iterable[object]) -> bool:
    """Whether `make check` leaves a test out. ``path`` of its module is relative to `tests`."""
    names = {parameter for parameter in parameters if isinstance(parameter, str)}
    return (
        not INTEGRATION_DIRECTORIES.isdisjoint(path.parts[:1])
        or str(path) in INTEGRATION_MODULES
        or not INTEGRATION_FIXTURES.isdisjoint(fixtures)
        or not SERVERS.isdisjoint(names)
    )
