"""The `file:///dir` store: objects are plain files under a directory, where `ls` shows them.

What always holds: see `tree` (publication), `listing` (order), `uploads` (multipart). An object's ETag is
its file's time stamp, size and inode number; `get` compares it before and after the read, so bytes of two versions are
never mixed. Directories that hold something are not objects unless they were put as ``dir/``.

Called from any worker thread. A crash leaves at most a temporary file or an unfinished upload under ``.lakefs``.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import KeyRefused, NotFound, PreconditionFailed, StoreError, Unavailable
from lakefs_fuse.store.local.listing import LocalListing
from lakefs_fuse.store.local.tree import LocalTree, file_etag, translated
from lakefs_fuse.store.local.uploads import LocalUploads, copy_bytes
from lakefs_fuse.store.protocol import Body, Fetched, ListPage, ObjectMeta, PartRef, UploadRef
from lakefs_fuse.store.rate_limit import RateLimiter


class LocalStore:
    """An `ObjectStore` on one directory of this machine."""

    def __init__(self, root: str, rng: random.Random, clock: Clock, limiter: RateLimiter | None = None) -> None:
        """``rng`` makes names and upload ids, and is this store's alone. Raises NoSuchBucket, AccessDenied,
        ConfigError."""
        self._clock = clock
        self._tree = LocalTree(root, rng, clock)
        self._listing = LocalListing(self._tree)
        self._uploads = LocalUploads(self._tree)
        self._limiter = limiter

    @property
    def name(self) -> str:
        """What the log and `stats` call this store."""
        return "local"

    def get(self, key: str, start: int, end: int, *, etag: str | None = None) -> Fetched:
        """See `ObjectStore.get`."""
        if key.endswith("/"):
            meta = self.head(key)
            if etag is not None and etag != meta.etag:
                raise PreconditionFailed(f"{key!r} is another version now")
            return Fetched(b"", meta)
        fd, status = self._tree.open_file(key)
        try:
            version = file_etag(status)
            if etag is not None and etag != version:
                raise PreconditionFailed(f"{key!r} is another version now")
            with translated("read", key):
                data = _read(fd, start, min(end, status.st_size))
                metadata = self._tree.read_metadata(fd, status)
                changed = file_etag(os.fstat(fd)) != version
        finally:
            os.close(fd)
        if changed:
            if etag is not None:
                raise PreconditionFailed(f"{key!r} was changed while it was read")
            raise Unavailable(f"{key!r} was changed while it was read")
        return Fetched(data, ObjectMeta(key, status.st_size, version, status.st_mtime_ns, metadata))

    def head(self, key: str) -> ObjectMeta:
        """See `ObjectStore.head`."""
        if key.endswith("/"):
            found = self._tree.directory_object(key)
            if found is None:
                raise NotFound(f"{key!r}: no such object")
            return found
        fd, status = self._tree.open_file(key)
        try:
            metadata = self._tree.read_metadata(fd, status)
        finally:
            os.close(fd)
        return ObjectMeta(key, status.st_size, file_etag(status), status.st_mtime_ns, metadata)

    def put(
        self, key: str, body: Body, *, metadata: Mapping[str, str] | None = None, if_absent: bool = False
    ) -> ObjectMeta:
        """See `ObjectStore.put`."""
        if key.endswith("/"):
            if (len(body) if isinstance(body, bytes) else body.length) > 0:
                raise KeyRefused(f"{key!r} is a directory here and cannot hold bytes")
            with translated("put", key):
                return self._tree.put_marker(key, metadata, if_absent=if_absent)
        return self._write(key, lambda fd: self._write_body(fd, body), metadata, if_absent=if_absent)

    def delete(self, key: str, *, etag: str | None = None) -> None:
        """See `ObjectStore.delete`. The version is checked right before."""
        try:
            if etag is not None and self.head(key).etag != etag:
                raise PreconditionFailed(f"{key!r} is another version now")
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
            if etag is not None and etag != found.etag:
                raise PreconditionFailed(f"{source!r} is another version now")
            return self.put(target, b"", metadata=found.metadata)
        fd, status = self._tree.open_file(source)
        try:
            if etag is not None and etag != file_etag(status):
                raise PreconditionFailed(f"{source!r} is another version now")
            metadata = self._tree.read_metadata(fd, status)
            if target.endswith("/"):
                if status.st_size:
                    raise KeyRefused(f"{target!r} is a directory here and cannot hold bytes")
                return self.put(target, b"", metadata=metadata)
            return self._write(
                target, lambda out: _copy_unchanged(fd, out, source, status, 0, status.st_size), metadata
            )
        finally:
            os.close(fd)

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
            return self._listing.page(prefix, delimiter, start_after, token, keys_max)

    def create_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        """See `ObjectStore.create_multipart`."""
        if key.endswith("/"):
            raise KeyRefused(f"{key!r} is a directory here and cannot hold bytes")
        return self._uploads.create(key, metadata)

    def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> PartRef:
        """See `ObjectStore.upload_part`."""
        return self._uploads.put_part(key, upload_id, number, lambda fd: self._write_body(fd, body))

    def upload_part_copy(
        self, key: str, upload_id: str, number: int, source: str, start: int, end: int, *, etag: str | None = None
    ) -> PartRef:
        """See `ObjectStore.upload_part_copy`."""
        fd, status = self._tree.open_file(source)
        try:
            if etag is not None and etag != file_etag(status):
                raise PreconditionFailed(f"{source!r} is another version now")
            if not 0 <= start < end <= status.st_size:
                raise StoreError(f"copy of bytes {start} to {end} of {source!r}: it has {status.st_size}")
            return self._uploads.put_part(
                key, upload_id, number, lambda out: _copy_unchanged(fd, out, source, status, start, end)
            )
        finally:
            os.close(fd)

    def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[PartRef], *, if_absent: bool = False
    ) -> ObjectMeta:
        """See `ObjectStore.complete_multipart`."""
        return self._uploads.complete(key, upload_id, parts, if_absent=if_absent)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """See `ObjectStore.abort_multipart`."""
        self._uploads.abort(key, upload_id)

    def list_multipart(self, prefix: str) -> Sequence[UploadRef]:
        """See `ObjectStore.list_multipart`."""
        with translated("list uploads of", prefix):
            return self._uploads.unfinished(prefix)

    def time_ns(self) -> int:
        """See `ObjectStore.time_ns`."""
        return self._clock.wall_ns()

    def close(self) -> None:
        """Nothing is held."""

    def _write_body(self, fd: int, body: Body) -> None:
        """To an empty file; holes of the body stay holes."""
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
            pieces = (body,) if isinstance(body, bytes) else body.pieces()
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[os.write(fd, view) :]

    def _write(
        self, key: str, fill: Callable[[int], None], metadata: Mapping[str, str] | None, *, if_absent: bool = False
    ) -> ObjectMeta:
        self._tree.path_to_write(key)
        with translated("put", key):
            fd, temporary = self._tree.new_temporary()
            try:
                fill(fd)
                status = self._tree.seal(fd, metadata)
                self._tree.publish(temporary, key, if_absent=if_absent)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            finally:
                os.close(fd)
        return ObjectMeta(key, status.st_size, file_etag(status), status.st_mtime_ns, dict(metadata or {}))


def _read(fd: int, start: int, end: int) -> bytes:
    data = os.pread(fd, max(0, end - start), start)
    while len(data) < end - start:
        more = os.pread(fd, end - start - len(data), start + len(data))
        if not more:
            break
        data += more
    return data


def _copy_unchanged(source: int, target: int, key: str, status: os.stat_result, start: int, end: int) -> None:
    copied = copy_bytes(source, target, start, end - start)
    if copied != end - start or file_etag(os.fstat(source)) != file_etag(status):
        raise PreconditionFailed(f"{key!r} was changed while it was copied")
