"""Multipart uploads of a local store: one directory under ``.lakefs/uploads`` each, one file a part.

What always holds: a part appears by rename when whole and synced; an upload is removed only after its object was
published (or on abort), so a crash at any point leaves an upload that can be completed again or aborted.

Called by `LocalStore` only, from any worker thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence

from lakefs_fuse.errors import NotFound, StoreError
from lakefs_fuse.store.local.tree import UPLOADS_DIR, LocalTree, encode_metadata, file_etag, sync_directory, translated
from lakefs_fuse.store.protocol import PARTS_MAX, FileSlice, ObjectMeta, PartRef, UploadRef

_ID = re.compile(r"[0-9a-f]{32}")
_ABOUT = "upload.json"


class LocalUploads:
    """Unfinished uploads of one tree."""

    def __init__(self, tree: LocalTree) -> None:
        self._tree = tree
        self._root = f"{tree.root}/{UPLOADS_DIR}"

    def create(self, key: str, metadata: Mapping[str, str] | None) -> str:
        """See `ObjectStore.create_multipart`."""
        self._tree.path_to_write(key)
        encode_metadata("", metadata or {})
        upload_id = self._tree.unique_name()
        about = {"key": key, "metadata": dict(metadata or {}), "started_ns": self._tree.unique_ns()}
        with translated("create upload", key):
            directory = f"{self._root}/{upload_id}"
            os.makedirs(directory)
            with open(f"{directory}/{_ABOUT}.tmp", "x", encoding="utf-8") as file:
                json.dump(about, file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(f"{directory}/{_ABOUT}.tmp", f"{directory}/{_ABOUT}")
            sync_directory(directory)
            sync_directory(self._root)
        return upload_id

    def put_part(self, key: str, upload_id: str, number: int, fill: Callable[[int], None]) -> PartRef:
        """``fill`` writes the part's bytes to the descriptor it is given."""
        self._about(key, upload_id)
        if not 1 <= number <= PARTS_MAX:
            raise StoreError(f"part number {number}: expected 1 to {PARTS_MAX}")
        directory = self._directory(upload_id)
        temporary = f"{directory}/{self._tree.unique_name()}"
        with translated("upload part of", key):
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fill(fd)
                status = self._tree.seal(fd, None)
                os.rename(temporary, _part_path(directory, number))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            finally:
                os.close(fd)
            sync_directory(directory)
        return PartRef(number, file_etag(status), status.st_size)

    def complete(self, key: str, upload_id: str, parts: Sequence[PartRef], *, if_absent: bool) -> ObjectMeta:
        """See `ObjectStore.complete_multipart`."""
        about = self._about(key, upload_id)
        metadata = about["metadata"]
        assert isinstance(metadata, dict)
        numbers = [part.number for part in parts]
        if not parts or numbers != sorted(set(numbers)):
            raise StoreError(f"complete {key!r}: parts are missing or not in ascending order")
        directory = self._directory(upload_id)
        with translated("complete", key):
            fd, temporary = self._tree.new_temporary()
            try:
                for part in parts:
                    _append_part(fd, _part_path(directory, part.number), part)
                status = self._tree.seal(fd, metadata)
                self._tree.publish(temporary, key, if_absent=if_absent)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            finally:
                os.close(fd)
        shutil.rmtree(directory, ignore_errors=True)
        return ObjectMeta(key, status.st_size, file_etag(status), status.st_mtime_ns, dict(metadata))

    def abort(self, key: str, upload_id: str) -> None:
        """See `ObjectStore.abort_multipart`."""
        with contextlib.suppress(NotFound):
            self._about(key, upload_id)
            directory = self._directory(upload_id)
            # First what names the upload: a crash in between leaves a directory that is no upload any more.
            with translated("abort", key):
                os.unlink(f"{directory}/{_ABOUT}")
                shutil.rmtree(directory)

    def unfinished(self, prefix: str) -> list[UploadRef]:
        """See `ObjectStore.list_multipart`."""
        found = []
        try:
            names = os.listdir(self._root)
        except FileNotFoundError:
            return []
        for name in names:
            document = _read_about(f"{self._root}/{name}")
            if document is None or not str(document["key"]).startswith(prefix):
                continue
            started = document["started_ns"]
            found.append(UploadRef(str(document["key"]), name, started if isinstance(started, int) else 0))
        return sorted(found, key=lambda upload: (upload.key, upload.upload_id))

    def _directory(self, upload_id: str) -> str:
        return f"{self._root}/{upload_id}"

    def _about(self, key: str, upload_id: str) -> dict[str, object]:
        document = _read_about(self._directory(upload_id)) if _ID.fullmatch(upload_id) else None
        if document is None or document["key"] != key:
            raise NotFound(f"no upload {upload_id!r} of {key!r}")
        return document


def copy_bytes(source: int, target: int, start: int, length: int) -> int:
    """Append ``length`` bytes of ``source`` from ``start`` to ``target`` in the kernel; answers how many there were.
    Holes stay holes."""
    offset = os.lseek(target, 0, os.SEEK_END)
    there = max(0, min(length, os.fstat(source).st_size - start))
    for data in FileSlice(source, start, there).data():
        at = data.offset - start
        done = _copy_data(source, target, data.offset, offset + at, data.length)
        if done < data.length:
            return at + done
    os.ftruncate(target, offset + there)
    return there


def _copy_data(source: int, target: int, start: int, offset: int, length: int) -> int:
    done = 0
    while done < length:
        try:
            copied = os.copy_file_range(source, target, length - done, start + done, offset + done)
        except OSError:
            # Other file systems and old kernels: sendfile works between any two files.
            os.lseek(target, offset + done, os.SEEK_SET)
            copied = os.sendfile(target, source, start + done, length - done)
        if copied == 0:
            break
        done += copied
    return done


def _append_part(fd: int, path: str, part: PartRef) -> None:
    try:
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise StoreError(f"part {part.number} was never uploaded") from error
    try:
        status = os.fstat(source)
        if file_etag(status) != part.etag:
            raise StoreError(f"part {part.number} was uploaded again since")
        copied = copy_bytes(source, fd, 0, status.st_size)
        if copied != status.st_size:
            raise StoreError(f"part {part.number} is shorter than it was")
    finally:
        os.close(source)


def _part_path(directory: str, number: int) -> str:
    return f"{directory}/{number:05d}"


def _read_about(directory: str) -> dict[str, object] | None:
    try:
        with open(f"{directory}/{_ABOUT}", encoding="utf-8") as file:
            document: object = json.load(file)
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict) or not {"key", "metadata", "started_ns"} <= document.keys():
        return None
    return document
