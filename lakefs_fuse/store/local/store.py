"""The `file:///dir` store: objects are plain files under a directory, where `ls` shows them.

What always holds, beside what `tree` (publication) and `list_pages` (order) say:

* an object's ETag is its file's time stamp, size and inode number; `get` compares it before and after the read, so
  bytes of two versions are never mixed;
* directories that hold something are not objects unless they were put as ``dir/``;
* a multipart upload is a directory under ``.lakefs/uploads`` with one file a part. A part appears by rename when whole
  and synced; an upload is removed only after its object was published (or on abort), so after a crash at any point it
  can still be completed or aborted.

A directory that is made for an object is listed before the object is, for as long as syncing takes. Called from any
worker thread. A crash leaves at most a temporary file or an unfinished upload under ``.lakefs``, or such a directory,
which then is an object, as every empty directory without a mark is.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.local_disk import free_bytes
from lakefs_fuse.errors import KeyRefused, NotFound, PartsRefused, PreconditionFailed, StoreError, Unavailable
from lakefs_fuse.store.local.list_pages import LocalPages
from lakefs_fuse.store.local.tree import (
    UPLOADS_DIR,
    LocalTree,
    encode_metadata,
    file_etag,
    file_object,
    require_version,
    sync_directory,
    translated,
)
from lakefs_fuse.store.protocol import (
    PARTS_MAX,
    Body,
    Fetched,
    FileSlice,
    ListPage,
    ObjectMeta,
    PartRef,
    UploadRef,
    length_of,
    pieces_of,
)
from lakefs_fuse.store.rate_limit import RateLimiter

_ID = re.compile(r"[0-9a-f]{32}")
_ABOUT = "upload.json"


class _About(msgspec.Struct):
    """Contents of the file that makes a directory an upload."""

    key: str
    metadata: dict[str, str]
    started_ns: int


class LocalStore:
    """An `ObjectStore` on one directory of this machine."""

    name = "local"
    """The name of this store in the log and in `stats`."""

    def __init__(self, root: str, rng: random.Random, clock: Clock, limiter: RateLimiter | None = None) -> None:
        """``rng`` makes names and upload ids, and is this store's alone. Raises NoSuchBucket, AccessDenied,
        ConfigError."""
        self._clock = clock
        self._tree = LocalTree(root, rng, clock)
        self._pages = LocalPages(self._tree)
        self._uploads = f"{self._tree.root}/{UPLOADS_DIR}"
        self._limiter = limiter

    def get(self, key: str, start: int, end: int, *, etag: str | None = None) -> Fetched:
        """See `ObjectStore.get`."""
        if key.endswith("/"):
            meta = self.head(key)
            require_version(key, meta.etag, etag)
            return Fetched(b"", meta)
        with self._tree.opened(key, etag) as (fd, status), translated("read", key):
            data = _read(fd, start, min(end, status.st_size))
            metadata = self._tree.read_metadata(fd, status)
            changed = file_etag(os.fstat(fd)) != file_etag(status)
        if changed:
            kind = Unavailable if etag is None else PreconditionFailed
            raise kind(f"{key!r} was changed while it was read")
        return Fetched(data, file_object(key, status, metadata))

    def head(self, key: str) -> ObjectMeta:
        """See `ObjectStore.head`."""
        if key.endswith("/"):
            found = self._tree.directory_object(key)
            if found is None:
                raise NotFound(f"{key!r}: no such object")
            return found
        with self._tree.opened(key) as (fd, status):
            metadata = self._tree.read_metadata(fd, status)
        return file_object(key, status, metadata)

    def put(
        self, key: str, body: Body, *, metadata: Mapping[str, str] | None = None, if_absent: bool = False,
        etag: str | None = None,
    ) -> ObjectMeta:  # fmt: skip
        """See `ObjectStore.put`. The version is checked before the bytes are written."""
        _refuse_bytes(key, length_of(body))
        if etag is not None:
            require_version(key, self.head(key).etag, etag)
        if key.endswith("/"):
            with translated("put", key):
                return self._tree.put_marker(key, metadata, if_absent=if_absent)
        return self._tree.write("put", key, lambda fd: self._write_body(fd, body), metadata, if_absent=if_absent)

    def delete(self, key: str, *, etag: str | None = None) -> None:
        """See `ObjectStore.delete`. The version is checked right before."""
        try:
            if etag is not None:
                require_version(key, self.head(key).etag, etag)
        except NotFound:
            return
        with translated("delete", key):
            directory = self._tree.remove(key)
            if directory is not None:
                self._tree.prune(directory)

    def delete_many(self, keys: Sequence[str]) -> Mapping[str, str]:
        """See `ObjectStore.delete_many`."""
        failed: dict[str, str] = {}
        directories: set[str] = set()
        self._tree.require_root()
        for key in keys:
            try:
                with translated("delete", key):
                    directory = self._tree.remove(key)
            except StoreError as error:
                failed[key] = str(error)
            else:
                directories.update([directory] if directory is not None else [])
        for directory in sorted(directories, reverse=True):
            self._tree.prune(directory)
        return failed

    def copy(self, source: str, target: str, *, etag: str | None = None) -> ObjectMeta:
        """See `ObjectStore.copy`."""
        if source.endswith("/"):
            found = self.head(source)
            require_version(source, found.etag, etag)
            return self.put(target, b"", metadata=found.metadata)
        with self._tree.opened(source, etag) as (fd, status):
            metadata = self._tree.read_metadata(fd, status)
            _refuse_bytes(target, status.st_size)
            if target.endswith("/"):
                return self.put(target, b"", metadata=metadata)
            return self._tree.write(
                "put", target, lambda out: _copy_unchanged(fd, out, source, status, 0, status.st_size), metadata
            )

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        start_after: str = "",
        token: str | None = None,
        keys_max: int = 1000,
    ) -> ListPage:
        """See `ObjectStore.list_page`. Raises Unsupported for another delimiter than '/'."""
        with translated("list", prefix):
            return self._pages.page(prefix, delimiter, start_after, token, keys_max)

    def create_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        """See `ObjectStore.create_multipart`."""
        _refuse_bytes(key)
        self._tree.path(key, KeyRefused)
        encode_metadata("", metadata or {})
        upload_id = self._tree.unique_name()
        about = _About(key, dict(metadata or {}), self._tree.unique_ns())
        # Not msgspec.json, which refuses names that are not UTF-8.
        encoded = json.dumps(msgspec.to_builtins(about)).encode()
        with translated("create upload", key):
            self._tree.make_own(self._uploads)
            os.mkdir(self._directory(upload_id))
            try:
                self._tree.write_own(
                    f"{self._directory(upload_id)}/{_ABOUT}", 0o666, lambda fd: _write_all(fd, encoded)
                )
            except OSError:
                os.rmdir(self._directory(upload_id))
                raise
            sync_directory(self._uploads)
        return upload_id

    def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> PartRef:
        """See `ObjectStore.upload_part`."""
        return self._put_part(key, upload_id, number, lambda fd: self._write_body(fd, body))

    def upload_part_copy(
        self, key: str, upload_id: str, number: int, source: str, start: int, end: int, *, etag: str | None = None
    ) -> PartRef:
        """See `ObjectStore.upload_part_copy`."""
        with self._tree.opened(source, etag) as (fd, status):
            if not 0 <= start < end <= status.st_size:
                raise StoreError(f"copy of bytes {start} to {end} of {source!r}: it has {status.st_size}")
            return self._put_part(
                key, upload_id, number, lambda out: _copy_unchanged(fd, out, source, status, start, end)
            )

    def _put_part(self, key: str, upload_id: str, number: int, fill: Callable[[int], None]) -> PartRef:
        self._about(key, upload_id)
        if not 1 <= number <= PARTS_MAX:
            raise StoreError(f"part number {number}: expected 1 to {PARTS_MAX}")
        with translated("upload part of", key):
            status = self._tree.write_own(self._part_path(upload_id, number), 0o600, fill)
        return PartRef(number, file_etag(status), status.st_size)

    def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[PartRef], *, if_absent: bool = False, etag: str | None = None
    ) -> ObjectMeta:
        """See `ObjectStore.complete_multipart`. The version is checked before the parts are joined."""
        about = self._about(key, upload_id)
        if etag is not None:
            require_version(key, self.head(key).etag, etag)
        numbers = [part.number for part in parts]
        if not parts or numbers != sorted(set(numbers)):
            raise StoreError(f"complete {key!r}: parts are missing or not in ascending order")

        def append_parts(fd: int) -> None:
            for part in parts:
                _append_part(fd, self._part_path(upload_id, part.number), part)

        meta = self._tree.write("complete", key, append_parts, about.metadata, if_absent=if_absent)
        shutil.rmtree(self._directory(upload_id), ignore_errors=True)
        return meta

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """See `ObjectStore.abort_multipart`."""
        with contextlib.suppress(NotFound), translated("abort", key):
            self._about(key, upload_id)
            # First the file that makes it an upload: a crash in between leaves a directory that is not an upload.
            os.unlink(f"{self._directory(upload_id)}/{_ABOUT}")
            shutil.rmtree(self._directory(upload_id))

    def list_multipart(self, prefix: str) -> Sequence[UploadRef]:
        """See `ObjectStore.list_multipart`."""
        self._tree.require_root()
        with translated("list uploads of", prefix):
            try:
                names = os.listdir(self._uploads)
            except FileNotFoundError:
                return []
        found = [(name, _read_about(self._directory(name))) for name in names]
        uploads = [
            UploadRef(about.key, name, about.started_ns)
            for name, about in found
            if about is not None and about.key.startswith(prefix)
        ]
        return sorted(uploads, key=lambda upload: (upload.key, upload.upload_id))

    def _directory(self, upload_id: str) -> str:
        return f"{self._uploads}/{upload_id}"

    def _part_path(self, upload_id: str, number: int) -> str:
        return f"{self._directory(upload_id)}/{number:05d}"

    def _about(self, key: str, upload_id: str) -> _About:
        self._tree.require_root()
        about = _read_about(self._directory(upload_id)) if _ID.fullmatch(upload_id) else None
        if about is None or about.key != key:
            raise NotFound(f"no upload {upload_id!r} of {key!r}")
        return about

    def time_ns(self) -> int:
        """See `ObjectStore.time_ns`."""
        return self._clock.wall_ns()

    def free_bytes(self) -> int:
        """See `DirectoryStore.free_bytes`."""
        with translated("ask for the free space of", self._tree.root):
            return free_bytes(self._tree.root)

    def remove_own_directories(self) -> None:
        """See `DirectoryStore.remove_own_directories`."""
        self._tree.remove_own()

    def close(self) -> None:
        """Nothing is held."""

    def _write_body(self, fd: int, body: Body) -> None:
        """Write a body to an empty file; its holes stay holes."""
        if isinstance(body, bytes):
            self._write_data(fd, body)
            return
        for data in body.data():
            os.lseek(fd, data.offset - body.offset, os.SEEK_SET)
            self._write_data(fd, data)
        os.ftruncate(fd, body.length)

    def _write_data(self, fd: int, body: Body) -> None:
        if self._limiter is not None:
            pieces: Iterable[bytes] = self._limiter.pieces(body)
        else:
            pieces = pieces_of(body)
        for piece in pieces:
            _write_all(fd, piece)


def _refuse_bytes(key: str, count: int = 1) -> None:
    """Raises KeyRefused for an object ``dir/`` that would hold ``count`` bytes."""
    if key.endswith("/") and count:
        raise KeyRefused(f"{key!r} is a directory here and cannot hold bytes")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read(fd: int, start: int, end: int) -> bytes:
    data = os.pread(fd, max(0, end - start), start)
    while len(data) < end - start:
        more = os.pread(fd, end - start - len(data), start + len(data))
        if not more:
            break
        data += more
    return data


def _copy_unchanged(source: int, target: int, key: str, status: os.stat_result, start: int, end: int) -> None:
    copied = _copy_bytes(source, target, start, end - start)
    if copied != end - start or file_etag(os.fstat(source)) != file_etag(status):
        raise PreconditionFailed(f"{key!r} was changed while it was copied")


def _copy_bytes(source: int, target: int, start: int, length: int) -> int:
    """Append ``length`` bytes of ``source`` from ``start`` to ``target`` in the kernel; returns how many there were.
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
        raise PartsRefused(f"part {part.number} was never uploaded") from error
    try:
        status = os.fstat(source)
        if file_etag(status) != part.etag:
            raise PartsRefused(f"part {part.number} was uploaded again since")
        copied = _copy_bytes(source, fd, 0, status.st_size)
        if copied != status.st_size:
            raise StoreError(f"part {part.number} is shorter than it was")
    finally:
        os.close(source)


def _read_about(directory: str) -> _About | None:
    try:
        with open(f"{directory}/{_ABOUT}", encoding="utf-8") as file:
            return msgspec.convert(json.load(file), _About)
    except (OSError, ValueError):
        return None
