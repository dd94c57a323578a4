"""The probe: finds the abilities of a store by using them.

Everything is written under ``.lakefs/probe-<random>/`` and removed again, whether or not the probe succeeds: objects
by the names that were used and by listing, uploads by aborting. A crash in mid-probe leaves a few small
objects there, which no mount shows.

Blocking: about 80 requests, each tried a few times. Called before anything is served, once for each lake and store (see
`lake_record`).
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import (
    AccessDenied,
    ConfigError,
    KeyRefused,
    LakeError,
    NotFound,
    PreconditionFailed,
    StoreError,
    Unavailable,
    Unsupported,
)
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.open_retries import retry_unavailable
from lakefs_fuse.store.protocol import Capabilities, ListPage, NetworkStore, ObjectStore, PartRef, Sender

P = ParamSpec("P")
T = TypeVar("T")

PROBES = f"{RESERVED_PREFIX}probe-"
"""Prefix of the keys of a probe."""
BODY = b"0123456789"
SUSPECT_CHARACTERS = "\\%+#?*:\"<>|&;=' \t\n\x7f"
"""Characters that some server or gateway changes on their way into a key."""
CLEANINGS_MAX = 3
OTHER_ETAG = "0" * 32
"""ETag of no object: a precondition with it fails."""

_ORDER = ("a", "a-b", "a/b", "a0", "b")
"""In the order of their bytes, which differs from that of a tree walk."""
_NOTES = {
    "ranges": "ranges of an object are not answered: whole objects are read and cut",
    "partial_status": "ranges are answered 200, not 206: reads go through boto3, at about 500 requests a second",
    "get_if_match": "conditions on GET are ignored: versions are compared after each read",
    "put_if_absent": "conditions on PUT are ignored: exclusive creation is a HEAD before the PUT",
    "complete_if_absent": "conditions on completing an upload are ignored: exclusive creation asks before and after",
    "part_copy": "parts cannot be copied: bytes of a changed file that stay are uploaded again",
    "parts_replaceable": "parts are final once uploaded: a file that changes behind the writer is uploaded again",
    "complete_etag": "completing an upload does not answer the ETag: it is asked for",
    "sorted_listing": "listings are not in the order of bytes: any order will do",
    "lists_markers": "there are no directory markers: empty directories exist only on the node that made them",
    "metadata": "user metadata is not kept: modes, owners and exact times of files are not",
    "copy_if_match": "conditions on copies are ignored: versions are compared before and after",
    "md5_etags": "ETags are not MD5 sums: uploads carry Content-MD5, which the store may or may not check",
    "checks_crc32": "CRC-32 sums of uploads are not checked: MD5 sums guard them, at five times the price",
}


def probe(
    store: ObjectStore,
    rng: random.Random,
    clock: Clock,
    *,
    read_only: bool = False,
) -> Capabilities:
    """Find out the capabilities of a store, and adapt it to them. Raises ConfigError if the store cannot serve (it has
    no multipart uploads), AccessDenied if writing is not allowed, Unavailable if it did not answer. ``read_only``
    writes nothing and assumes the minimum.
    """
    finding = _Probe(store, rng, clock)
    found = finding.read_only() if read_only else finding.run()
    name = getattr(store, "name", type(store).__name__)
    notes = [text for field, text in _NOTES.items() if not found[field] and field in finding.seen]
    refused = finding.characters_refused
    if refused:
        notes.append(f"keys with any of {refused!r} are refused: the store would change them")
    capabilities = Capabilities(name=str(name), **found, characters_refused=refused, notes=tuple(notes))
    if isinstance(store, NetworkStore):
        store.adapt(capabilities)
    return capabilities


class _Probe:
    def __init__(self, store: ObjectStore, rng: random.Random, clock: Clock) -> None:
        self._store = store
        self._server = store if isinstance(store, NetworkStore) else None
        self._clock = clock
        self._base = f"{PROBES}{rng.getrandbits(64):016x}/"
        self._written: list[str] = []
        self._uploads: list[tuple[str, str]] = []
        self.characters_refused = ""
        self._complete_etag = True
        self.seen: set[str] = set()
        """Capabilities that were found out, not assumed."""

    def run(self) -> dict[str, bool]:
        """Run all tests, then clean up. A failed clean-up is an error only if everything else succeeded."""
        try:
            found = self._find()
        except BaseException:
            with contextlib.suppress(LakeError):
                self._clean()
            raise
        self._clean()
        return found

    def read_only(self) -> dict[str, bool]:
        """Read an existing object, if any; assume the minimum for everything else."""
        found = dict.fromkeys(_NOTES, False)
        found |= {"multipart": True, "metadata": True, "ranges": True}
        if self._server is None:
            return found | self._reading("", 0)
        for meta in self._list("", keys_max=100).objects:
            if meta.size > 1 and meta.etag:
                try:
                    return found | self._reading(meta.key, meta.size)
                except Unavailable:
                    raise
                except StoreError:  # it is archived, gone, not for this reader, or encrypted with a key of its owner
                    continue
        return found

    def _find(self) -> dict[str, bool]:
        key = self._base + "object"
        try:
            etag = self._put(key, BODY, {"mode": "33188", "mtime": "1.5"})
        except AccessDenied as error:
            raise AccessDenied(f"{error}; to read only, mount with --read-only") from error
        head = self._ask(self._store.head, key)
        found = self._reading(key, len(BODY))
        found["metadata"] = dict(head.metadata or {}) == {"mode": "33188", "mtime": "1.5"}
        found["md5_etags"] = etag == hashlib.md5(BODY, usedforsecurity=False).hexdigest()
        found["put_if_absent"] = self._refuses(
            lambda: self._store.put(key, BODY, metadata={}, if_absent=True), Unsupported
        )
        found["copy_if_match"] = self._copies_conditionally(key)
        found["sorted_listing"] = self._lists_in_order()
        found["lists_markers"] = self._lists_markers()
        found |= self._uploading(key)
        found["complete_if_absent"] = self._completes_conditionally(self._base + "upload")
        found |= self._changing(key)
        found["delete_many"] = self._deletes_many()
        found["dates"] = self._tells_time()
        self.characters_refused = self._refused_of(SUSPECT_CHARACTERS)
        self.seen |= found.keys() - {"md5_etags", "checks_crc32"}
        if self._server is not None:
            self.seen |= {"md5_etags"} if self._server.is_guarded else {"md5_etags", "checks_crc32"}
        return found

    # -- single findings -----------------------------------------------------------------------------------------

    def _reading(self, key: str, size: int) -> dict[str, bool]:
        if self._server is None:
            return {"ranges": True, "partial_status": True, "get_if_match": True}
        observe = self._server.observe_get
        self.seen |= {"ranges", "partial_status", "get_if_match"}
        status, length = self._ask(observe, key, 0, 1)
        ranges = length == 1 and size > 1
        conditional = self._refuses(lambda: observe(key, 0, 1, etag=OTHER_ETAG))
        return {"ranges": ranges, "partial_status": ranges and status == 206, "get_if_match": conditional}

    def _changing(self, key: str) -> dict[str, bool]:
        """Find the requests that honour If-Match: each is tried with an ETag that the object does not have."""
        server = self._server
        if server is None:
            return {"put_if_match": False, "complete_if_match": False, "delete_if_match": False}
        put = self._refuses(lambda: self._store.put(key, BODY, etag=OTHER_ETAG), StoreError)
        upload_id, part = self._begin_upload(key, BODY)
        complete = self._refuses(
            lambda: self._store.complete_multipart(key, upload_id, [part], etag=OTHER_ETAG), StoreError
        )
        delete = self._refuses(lambda: server.delete_if_match(key, OTHER_ETAG), StoreError)
        return {"put_if_match": put, "complete_if_match": complete, "delete_if_match": delete}

    def _deletes_many(self) -> bool:
        """Some policies allow DeleteObject and refuse DeleteObjects."""
        key = self._base + "deleted"
        self._put(key, BODY)
        try:
            if not self._ask(self._store.delete_many, [key]):
                self._ask(self._store.head, key)
        except NotFound:
            return True
        except StoreError:
            return False
        return False

    def _tells_time(self) -> bool:
        try:
            self._ask(self._store.time_ns)
        except Unsupported:
            return False
        return True

    def _completes_conditionally(self, key: str) -> bool:
        """Whether an upload over an existing object is refused. Some servers ignore the condition and say nothing."""
        upload_id, part = self._begin_upload(key, BODY)
        return self._refuses(
            lambda: self._store.complete_multipart(key, upload_id, [part], if_absent=True), Unsupported
        )

    def _copies_conditionally(self, key: str) -> bool:
        target = self._base + "copy"
        self._written.append(target)
        return self._refuses(lambda: self._store.copy(key, target, etag=OTHER_ETAG), Unsupported)

    def _lists_in_order(self) -> bool:
        base = self._base + "order/"
        # A store that cannot hold both `a` and `a/b` says so, or fails in its own way.
        expected = [base + name for name in _ORDER if self._try(partial(self._put, base + name)) is not None]
        if [meta.key for meta in self._list(base).objects] != expected:
            return False
        return self._lists_prefixes_in_order(base)

    def _lists_prefixes_in_order(self, base: str) -> bool:
        """The same with one key a page: whether a prefix comes where its bytes belong."""
        seen: list[str] = []
        token = None
        for _ in range(3 * len(_ORDER)):
            page = self._list(base, delimiter="/", token=token, keys_max=1)
            seen += [meta.key for meta in page.objects] + list(page.prefixes)
            token = page.next_token
            if token is None:
                break
        return seen == sorted(seen)

    def _lists_markers(self) -> bool:
        base = self._base + "marker/"
        try:
            self._put(base + "dir/")
        except (Unavailable, AccessDenied):
            raise
        except StoreError:
            return False
        self._written.append(base + "dir")
        page = self._list(base, delimiter="/")
        return list(page.prefixes) == [base + "dir/"] and not [m for m in page.objects if m.key != base]

    def _uploading(self, source: str) -> dict[str, bool]:
        """What uploads can do; with sums, unless these cost a liberty."""
        server = self._server
        if server is not None and not server.is_guarded and self._try(partial(self._checks_crc32, server.sender)):
            found = self._multipart(source)
            if all(found.values()):
                return {**found, "checks_crc32": True}
        if server is not None:
            server.sender.use_sums(False)
        return {**self._multipart(source), "checks_crc32": False}

    def _checks_crc32(self, sender: Sender) -> bool:
        """Whether wrong sums are refused and right ones are not, for an object and a part; then they are sent on."""
        key, right = self._base + "summed", zlib.crc32(BODY)
        self._written.append(key)
        if self._ask(sender.accepts, key, BODY, right ^ 1):
            return False
        sender.use_sums(True)
        upload_id = self._create_upload(key)
        return (
            not self._ask(sender.accepts, key, BODY, right ^ 1, upload_id)
            and self._ask(sender.accepts, key, BODY, right)
            and self._ask(sender.accepts, key, BODY, right, upload_id)
        )

    def _multipart(self, source: str) -> dict[str, bool]:
        """Uploads of one small part, first with all liberties taken. Raises ConfigError where there are none."""
        key = self._base + "upload"
        self._written.append(key)
        try:
            replaceable = bool(self._try(partial(self._replaces_parts, key)))
            if not replaceable and not self._completes(key, *self._begin_upload(key, BODY[2:6])):
                raise Unsupported("a completed upload is not what was uploaded")
        except (Unsupported, KeyRefused) as error:
            raise ConfigError(f"the store cannot be mounted: it lacks multipart uploads ({error})") from error
        found = {"multipart": True, "parts_replaceable": replaceable, "complete_etag": self._complete_etag}
        return {**found, "part_copy": bool(self._try(partial(self._copies_parts, source)))}

    def _replaces_parts(self, key: str) -> bool:
        upload_id, _ = self._begin_upload(key, BODY)
        self._ask(self._store.upload_part, key, upload_id, 3, b"dropped")
        part = self._ask(self._store.upload_part, key, upload_id, 1, BODY[2:6])
        return self._completes(key, upload_id, part)

    def _copies_parts(self, source: str) -> bool:
        key = self._base + "upload-copied"
        self._written.append(key)
        upload_id = self._create_upload(key)
        part = self._ask(self._store.upload_part_copy, key, upload_id, 1, source, 2, 6)
        return self._completes(key, upload_id, part)

    def _create_upload(self, key: str) -> str:
        upload_id = self._ask(self._store.create_multipart, key)
        self._uploads.append((key, upload_id))
        return upload_id

    def _begin_upload(self, key: str, body: bytes) -> tuple[str, PartRef]:
        """An upload with its first part."""
        upload_id = self._create_upload(key)
        return upload_id, self._ask(self._store.upload_part, key, upload_id, 1, body)

    def _completes(self, key: str, upload_id: str, part: PartRef) -> bool:
        """Whether bytes 2 to 6 of `BODY` are what is there after completing with one part."""
        done = self._ask(self._store.complete_multipart, key, upload_id, [part])
        meta = self._ask(self._store.head, key)
        self._complete_etag = done.etag == meta.etag
        return meta.size == 4 and bytes(self._ask(self._store.get, key, 0, 4).data) == BODY[2:6]

    def _refused_of(self, characters: str) -> str:
        """Try all together first, and each half if that failed."""
        if self._try(partial(self._keeps, f"{self._base}keys/{ord(characters[0])}-{len(characters)}/", characters)):
            return ""
        half = len(characters) // 2
        return self._refused_of(characters[:half]) + self._refused_of(characters[half:]) if half else characters

    def _keeps(self, base: str, characters: str) -> bool:
        key = f"{base}x{characters}x"
        self._put(key)
        return key in [meta.key for meta in self._list(base).objects]

    # -- how calls are made --------------------------------------------------------------------------------------

    def _ask(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return retry_unavailable(lambda: call(*args, **kwargs), self._clock)

    def _try(self, call: Callable[[], T]) -> T | None:
        """The answer of what a store may fail at in its own way, else None; but not being allowed to is no answer."""
        try:
            return call()
        except AccessDenied:
            raise
        except StoreError:
            return None

    def _refuses(self, call: Callable[[], object], *ignored: type[StoreError]) -> bool:
        """Whether a call whose condition does not hold is refused. One that fails with an ``ignored`` error is not."""
        try:
            self._ask(call)
        except PreconditionFailed:
            return True
        except AccessDenied:
            raise
        except ignored:
            return False
        return False

    def _list(self, prefix: str, *, delimiter: str = "", token: str | None = None, keys_max: int = 1000) -> ListPage:
        return self._ask(self._store.list_page, prefix, delimiter=delimiter, token=token, keys_max=keys_max)

    # -- writing and cleaning up ---------------------------------------------------------------------------------

    def _put(self, key: str, body: bytes = b"", metadata: dict[str, str] | None = None) -> str:
        self._written.append(key)
        return self._ask(self._store.put, key, body, metadata=metadata).etag

    def _clean(self) -> None:
        """Remove everything; raises the last error if something could not be removed."""
        failure: LakeError | None = None
        for _ in range(CLEANINGS_MAX):
            failure = None
            for key, upload_id in self._uploads:
                try:
                    self._ask(self._store.abort_multipart, key, upload_id)
                except LakeError as error:
                    failure = error
            try:
                self._delete_all()
                if failure is None and not self._leftovers():
                    break
            except LakeError as error:
                failure = error
        if failure is not None:
            raise failure

    def _delete_all(self) -> None:
        leftovers = self._leftovers()
        keys = sorted({*self._written, *leftovers}, key=len, reverse=True)
        # A server that keeps its keys in directories goes on listing empty ones as prefixes.
        self._delete([*keys, *self._directories(leftovers)])
        page = self._list(RESERVED_PREFIX, delimiter="/", keys_max=2)
        if not page.prefixes and [meta.key for meta in page.objects] == [RESERVED_PREFIX]:
            self._ask(self._store.delete, RESERVED_PREFIX)

    def _delete(self, keys: Sequence[str]) -> None:
        """Delete keys in this order: together, or one by one if that was not done."""
        failed = self._try(lambda: self._ask(self._store.delete_many, keys))
        if failed is None or failed or self._leftovers():
            for key in keys:
                self._ask(self._store.delete, key)

    def _directories(self, keys: Sequence[str]) -> list[str]:
        """Every directory of ours that the keys lie in, children first."""
        found = {self._base}
        for key in [*self._written, *keys]:
            parts = key.split("/")
            found.update("/".join(parts[:depth]) + "/" for depth in range(3, len(parts)))
        return sorted(found, key=len, reverse=True)

    def _leftovers(self) -> list[str]:
        return [meta.key for meta in self._list(self._base).objects]
