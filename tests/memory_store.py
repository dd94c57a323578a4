"""An object store in memory that tests own: small pages, any order, requests on record, and hooks before and after.

`hook` runs in the worker thread of each request, before it takes effect and again after: it may raise (a request that
failed, or one whose answer was lost) or block (`Pause`).
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from lakefs_fuse.errors import AccessDenied, NotFound, PreconditionFailed, StoreError
from lakefs_fuse.store.protocol import Body, Capabilities, Fetched, ListPage, ObjectMeta, PartRef, UploadRef

When = Literal["before", "after"]
WAIT_S_MAX = 20.0
NS = 1_000_000_000
START_NS = 1_700_000_000_000_000_000


@dataclass(frozen=True)
class Request:
    """``what`` is the method's name; ``number`` the part's, where there is one; ``size`` bytes sent or asked for."""

    what: str
    key: str
    number: int = 0
    size: int = 0


@dataclass
class Upload:
    key: str
    metadata: Mapping[str, str]
    started_ns: int
    parts: dict[int, tuple[PartRef, bytes]] = field(default_factory=dict)


class Pause:
    """A place where requests that match wait until `resume`; `reached` tells that one does."""

    def __init__(self, matches: Callable[[Request], bool], when: When = "before") -> None:
        self._matches, self._when = matches, when
        self.reached = threading.Event()
        self._resumed = threading.Event()

    def resume(self) -> None:
        self._resumed.set()

    def __call__(self, request: Request, when: When) -> None:
        if when == self._when and self._matches(request) and not self._resumed.is_set():
            self.reached.set()
            assert self._resumed.wait(WAIT_S_MAX), f"nobody resumed {request}"


def pause_of_commits() -> Pause:
    """Where the PUT of a commit waits."""
    return Pause(lambda request: request.what == "put" and request.key.startswith(".lakefs/commits/"))


class Failures:
    """Requests that match raise ``error``, the first ``count`` of them."""

    def __init__(
        self, matches: Callable[[Request], bool], error: Exception, *, count: int = 1, when: When = "before"
    ) -> None:
        self._matches, self._error, self._when = matches, error, when
        self.left = count

    def __call__(self, request: Request, when: When) -> None:
        if when == self._when and self.left and self._matches(request):
            self.left -= 1
            raise self._error


def body_bytes(body: Body) -> bytes:
    return body if isinstance(body, bytes) else b"".join(body.pieces())


class MemoryStore:
    """An `ObjectStore`; see the module's head. Thread-safe but for the hook."""

    def __init__(self, capabilities: Capabilities | None = None, *, page_keys_max: int = 1000) -> None:
        self.clock: Callable[[], int] = lambda: START_NS
        self.capabilities = capabilities or Capabilities(name="memory")
        self.page_keys_max = page_keys_max
        self.copies_keep_etags = False
        self.equal_bytes_have_equal_etags = False
        """As in S3 where an ETag is a hash of the bytes; else no two versions have the same."""
        self.clients_behind_ns = 0
        """By so much earlier does the answer to a PUT date an object; `protocol.ObjectStore.put` allows that."""
        self.objects: dict[str, tuple[bytes, ObjectMeta]] = {}
        self.uploads: dict[str, Upload] = {}
        self.requests: list[Request] = []
        self.hook: Callable[[Request, When], None] = lambda _request, _when: None
        self.parts_in_flight: Counter[tuple[str, int]] = Counter()
        self.parts_collided = False
        self._lock = threading.RLock()
        self.serial = 0

    @property
    def now_ns(self) -> int:
        return self.clock()

    @property
    def date_ns(self) -> int:
        """What LastModified says of an object that is stored now."""
        return self.now_ns // NS * NS

    # -- what tests do from outside

    def give(self, key: str, data: bytes = b"", metadata: Mapping[str, str] | None = None) -> ObjectMeta:
        """Somebody else puts an object."""
        with self._lock:
            self.serial += 1
            etag = hashlib.md5(data if self.equal_bytes_have_equal_etags else data + b"%d" % self.serial).hexdigest()
            meta = ObjectMeta(key, len(data), etag, self.date_ns, dict(metadata or {}))
            self.objects[key] = (data, meta)
            return meta

    def take(self, key: str) -> None:
        """Somebody else deletes an object."""
        with self._lock:
            self.objects.pop(key, None)

    def data(self, key: str) -> bytes:
        with self._lock:
            return self.objects[key][0]

    def metadata(self, key: str) -> Mapping[str, str]:
        with self._lock:
            return self.objects[key][1].metadata or {}

    def count(self, what: str, key: str | None = None) -> int:
        return sum(request.what == what and key in (None, request.key) for request in list(self.requests))

    def parts_sent(self) -> list[int]:
        """Numbers of parts uploaded, in the order in which the requests came."""
        return [request.number for request in list(self.requests) if request.what == "upload_part"]

    # -- the protocol

    def _begin(self, what: str, key: str, number: int = 0, size: int = 0) -> Request:
        request = Request(what, key, number, size)
        self.requests.append(request)
        self.hook(request, "before")
        return request

    def _found(self, key: str, etag: str | None = None) -> tuple[bytes, ObjectMeta]:
        if key not in self.objects:
            raise NotFound(f"no object {key}")
        if etag is not None and self.objects[key][1].etag != etag:
            raise PreconditionFailed(f"{key} is another version")
        return self.objects[key]

    def get(self, key: str, start: int, end: int, *, etag: str | None = None) -> Fetched:
        request = self._begin("get", key, size=end - start)
        with self._lock:
            data, meta = self._found(key, etag)
        self.hook(request, "after")
        return Fetched(data[start:end], meta)

    def head(self, key: str) -> ObjectMeta:
        request = self._begin("head", key)
        with self._lock:
            meta = self._found(key)[1]
        self.hook(request, "after")
        return meta

    def put(
        self, key: str, body: Body, *, metadata: Mapping[str, str] | None = None, if_absent: bool = False,
        etag: str | None = None,
    ) -> ObjectMeta:  # fmt: skip
        data = body_bytes(body)
        request = self._begin("put", key, size=len(data))
        with self._lock:
            if etag is not None:
                self._found(key, etag)
            if if_absent and key in self.objects:
                raise PreconditionFailed(f"{key} exists")
            meta = self.give(key, data, metadata)
        self.hook(request, "after")
        return self._answered(meta)

    def _answered(self, meta: ObjectMeta) -> ObjectMeta:
        """What is told of an object that was stored just now: the answer has no LastModified."""
        return msgspec.structs.replace(meta, mtime_ns=self.now_ns - self.clients_behind_ns)

    def delete(self, key: str, *, etag: str | None = None) -> None:
        request = self._begin("delete", key)
        with self._lock:
            if etag is not None and key in self.objects:
                self._found(key, etag)
            self.take(key)
        self.hook(request, "after")

    def delete_many(self, keys: Sequence[str]) -> Mapping[str, str]:
        """As S3, where a policy may deny some of the keys."""
        refused: dict[str, str] = {}
        for key in keys:
            try:
                self.delete(key)
            except AccessDenied as error:
                refused[key] = str(error)
        return refused

    def copy(self, source: str, target: str, *, etag: str | None = None) -> ObjectMeta:
        request = self._begin("copy", target)
        with self._lock:
            data, meta = self._found(source, etag)
            copied = self.give(target, data, meta.metadata)
            if self.copies_keep_etags:
                copied = msgspec.structs.replace(copied, etag=meta.etag)
                self.objects[target] = (data, copied)
        self.hook(request, "after")
        return copied

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        start_after: str = "",
        token: str | None = None,
        keys_max: int = 1000,
    ) -> ListPage:
        request = self._begin("list", prefix)
        with self._lock:
            begin = token if token is not None else self._place(start_after) if start_after else ""
            names = [name for name in self.names(prefix, delimiter) if self._place(name[0]) > begin]
            page = names[: min(keys_max, self.page_keys_max)]
            answer = ListPage(
                [self._listed(name) for name, common in page if not common],
                [name for name, common in page if common],
                self._place(page[-1][0]) if len(page) < len(names) else None,
            )
        self.hook(request, "after")
        return answer

    def _listed(self, key: str) -> ObjectMeta:
        meta = self.objects[key][1]
        return ObjectMeta(meta.key, meta.size, meta.etag, meta.mtime_ns)

    def names(self, prefix: str, delimiter: str) -> list[tuple[str, bool]]:
        names: dict[tuple[str, bool], None] = {}
        for key in self.objects:
            if not key.startswith(prefix):
                continue
            at = key.find(delimiter, len(prefix)) if delimiter else -1
            if at >= 0 and not self.capabilities.lists_markers and key == key[: at + 1]:
                continue
            names[(key, False) if at < 0 else (key[: at + 1], True)] = None
        return sorted(names, key=lambda name: self._place(name[0]))

    def _place(self, name: str) -> str:
        """Where a name stands in a listing; also what a page is continued by."""
        raw = name.encode("utf-8", "surrogatepass")
        return raw.hex() if self.capabilities.sorted_listing else hashlib.md5(raw).hexdigest()

    def create_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        request = self._begin("create_multipart", key)
        with self._lock:
            self.serial += 1
            upload_id = f"upload-{self.serial}"
            self.uploads[upload_id] = Upload(key, dict(metadata or {}), self.now_ns)
        self.hook(request, "after")
        return upload_id

    def _upload(self, key: str, upload_id: str) -> Upload:
        upload = self.uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise NotFound(f"no upload {upload_id} of {key}")
        return upload

    def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> PartRef:
        flight = (upload_id, number)
        with self._lock:
            self.parts_in_flight[flight] += 1
            self.parts_collided |= self.parts_in_flight[flight] > 1
        try:
            request = self._begin("upload_part", key, number)
            return self._store_part(request, upload_id, body_bytes(body))
        finally:
            with self._lock:
                self.parts_in_flight[flight] -= 1

    def _store_part(self, request: Request, upload_id: str, data: bytes) -> PartRef:
        with self._lock:
            upload = self._upload(request.key, upload_id)
            self.serial += 1
            ref = PartRef(request.number, f"part-{self.serial}", len(data))
            upload.parts[request.number] = (ref, data)
        self.hook(request, "after")
        return ref

    def upload_part_copy(
        self, key: str, upload_id: str, number: int, source: str, start: int, end: int, *, etag: str | None = None
    ) -> PartRef:
        request = self._begin("upload_part_copy", key, number, end - start)
        with self._lock:
            data, _ = self._found(source, etag)
            assert 0 <= start < end <= len(data), "a copy must lie within its source"
        return self._store_part(request, upload_id, data[start:end])

    def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[PartRef], *, if_absent: bool = False, etag: str | None = None
    ) -> ObjectMeta:
        request = self._begin("complete_multipart", key)
        with self._lock:
            upload = self._upload(key, upload_id)
            if [part.number for part in parts] != sorted({part.number for part in parts}) or not parts:
                raise StoreError("parts out of order")
            for part in parts:
                if part.number not in upload.parts or upload.parts[part.number][0].etag != part.etag:
                    raise StoreError(f"part {part.number} is not what was uploaded")
            if etag is not None:
                self._found(key, etag)
            if if_absent and key in self.objects:
                raise PreconditionFailed(f"{key} exists")
            data = b"".join(upload.parts[part.number][1] for part in parts)
            meta = self.give(key, data, upload.metadata)
            del self.uploads[upload_id]
        self.hook(request, "after")
        return self._answered(meta)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        request = self._begin("abort_multipart", key)
        with self._lock:
            self.uploads.pop(upload_id, None)
        self.hook(request, "after")

    def list_multipart(self, prefix: str) -> Sequence[UploadRef]:
        self._begin("list_multipart", prefix)
        with self._lock:
            return [
                UploadRef(upload.key, upload_id, upload.started_ns)
                for upload_id, upload in self.uploads.items()
                if upload.key.startswith(prefix)
            ]

    def time_ns(self) -> int:
        self._begin("time_ns", "")
        return self.now_ns

    def close(self) -> None:
        """Nothing is held."""
