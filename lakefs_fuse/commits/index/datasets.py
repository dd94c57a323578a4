"""Versions of datasets: named snapshots of one directory, with that directory as root, numbered in series.

What always holds (*nothing to replace*): the rows of a version name only objects below `.lakefs/`, which are never
replaced: packs and hidden objects as the lake has them, and copies of all other objects. If the object of an entry is
such a copy, the ETag of the entry is that of the original, otherwise it is empty. The manifest says which dataset and
version a snapshot is; its name alone does not, because any snapshot may have been given such a name.

Raises StoreError kinds throughout. For tasks of one trio loop. Nothing here writes, so a crash leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lakefs_fuse.commits.index import snapshots
from lakefs_fuse.commits.index.index import Manifest
from lakefs_fuse.config import VERSION_MAX, DatasetName
from lakefs_fuse.errors import ConfigError, DamagedCommit, NotFound
from lakefs_fuse.store.client import StoreClient

NAMED_MAX = 20
"""Maximum of versions that an error names."""


@dataclass(frozen=True, slots=True)
class DatasetVersion:
    """A version that exists. One that cannot be read has no ``manifest``, and ``why`` says the reason."""

    name: DatasetName
    manifest: Manifest | None
    why: str = ""


async def versions(client: StoreClient, dataset: str = "") -> list[DatasetVersion]:
    """Return all versions, of all datasets or of one, by name and number: one LIST, and one GET for each."""
    found: list[DatasetVersion] = []
    for snapshot in await snapshots.names(client):
        name = DatasetName.of_snapshot(snapshot)
        if name is None or (dataset and name.name != dataset):
            continue
        try:
            manifest = await snapshots.fetch_manifest(client, snapshot)
        except NotFound:
            continue  # it is being written, or was never finished
        except DamagedCommit as error:
            found.append(DatasetVersion(name, None, str(error)))
            continue
        if is_version(manifest, name):
            found.append(DatasetVersion(name, manifest))
    return sorted(found, key=lambda each: (each.name.name, each.name.version))


async def next_version(client: StoreClient, dataset: str) -> int:
    """Return the number after the newest version: one LIST. Versions that were never finished count as well. Raises
    ConfigError if the newest has the last number."""
    named = (DatasetName.of_snapshot(snapshot) for snapshot in await snapshots.names(client))
    newest = max((name.version for name in named if name is not None and name.name == dataset), default=0)
    if newest == VERSION_MAX:
        raise ConfigError(
            f"{dataset}@{newest} has the last number, and none follows: give one that is free, as in {dataset}@NUMBER "
            "(`lakefs-fuse dataset ls SOURCE` shows which are taken)"
        )
    return newest + 1


async def find(client: StoreClient, wanted: DatasetName) -> tuple[DatasetName, Manifest]:
    """Return a version, or the newest if ``wanted`` has no number. Raises ConfigError, which says what versions there
    are, and DamagedCommit."""
    if wanted.version:
        try:
            manifest = await snapshots.fetch_manifest(client, wanted.snapshot)
        except NotFound:
            manifest = None
        if manifest is not None and is_version(manifest, wanted):
            return wanted, manifest
    there = await versions(client, "" if wanted.version else wanted.name)
    if not wanted.version and there:
        newest = there[-1]
        if newest.manifest is None:
            raise DamagedCommit(f"{newest.name} cannot be read: {newest.why}")
        return newest.name, newest.manifest
    absence = describe_absence(wanted, there or await versions(client))
    raise ConfigError(f"{absence} (`lakefs-fuse dataset create SOURCE {wanted} PATH` makes it)")


def is_version(manifest: Manifest, name: DatasetName) -> bool:
    """Return whether a snapshot with the name of a version is that version, by its manifest."""
    told = manifest.dataset
    return told is not None and (told.name, told.version) == (name.name, name.version)


def describe_absence(wanted: DatasetName, there: Sequence[DatasetVersion]) -> str:
    """Return what an error says of a version that is not among those that exist."""
    return f"there is no dataset {wanted}; there are: {_named(there)}"


def _named(there: Sequence[DatasetVersion]) -> str:
    names = [str(each.name) for each in there[:NAMED_MAX]]
    return ", ".join(names) + (", …" if len(there) > NAMED_MAX else "") if names else "none"
