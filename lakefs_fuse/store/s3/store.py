"""The S3 store: one bucket, or a prefix of one, of any S3-compatible server.

What always holds:

* `get` checks ETag and length of what came, whatever the server was asked and whatever it says, so a store that ignores
  preconditions or ranges is slower, not wrong;
* what the server cannot do (`adapt`, from the probe) is done another way or refused by name;
* keys that obstore would change go through boto3, as do large bodies and everything rare.

Called from any worker thread; holds connections only. A crash leaves at most an unfinished multipart upload.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from botocore import exceptions as boto
from msgspec import structs

from lakefs_fuse.config import StoreConfig
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import (
    AccessDenied,
    ConfigError,
    FileError,
    KeyRefused,
    LakeError,
    NoSuchBucket,
    NotFound,
    PreconditionFailed,
    StoreError,
    Unavailable,
    Unsupported,
)
from lakefs_fuse.store.open_retries import retry_unavailable
from lakefs_fuse.store.protocol import (
    Body,
    CachedGetter,
    Capabilities,
    Fetched,
    FileSlice,
    ListPage,
    ObjectMeta,
    PartRef,
    UploadRef,
    length_of,
)
from lakefs_fuse.store.rate_limit import RateLimiter
from lakefs_fuse.store.s3.access import S3Access, connect
from lakefs_fuse.store.s3.errors import (
    RAISED_BY_BOTO,
    RangeIgnored,
    RangeNotSatisfiable,
    WrongRegion,
    from_answer,
    from_boto,
    unconditional,
    wrapped,
)
from lakefs_fuse.store.s3.fast_path import CachedGets, S3FastPath, is_expressible
from lakefs_fuse.store.s3.list_pages import S3Pages
from lakefs_fuse.store.s3.stored_objects import storage_class_of
from lakefs_fuse.store.s3.upload import Answer, S3Sender, etag_of, hides_md5, md5_of_sent

_log = logging.getLogger(__name__)
SKIP_BYTES = 1 << 20
"""Size of each read of the bytes before a range."""
_CONDITIONS = frozenset({"IfMatch", "IfNoneMatch", "CopySourceIfMatch"})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_XML_ILLEGAL = frozenset(map(chr, range(32))) - {"\t", "\n"}


class S3Store:
    """An `ObjectStore` over S3. Trusts nothing about the server until `adapt` was called."""

    name = "s3"
    """What the log and `stats` call this store."""

    def __init__(self, access: S3Access, clock: Clock, limiter: RateLimiter | None = None) -> None:
        self.access = access
        self._clock, self._limiter = clock, limiter
        self._client = access.client
        self._bucket, self._prefix = access.config.source.bucket, access.config.source.prefix
        self._pages = S3Pages(access)
        self._fast = S3FastPath(access, clock)
        self.sender = S3Sender(self._call, limiter, encrypted=access.encrypted)
        """Public for the probe, which tests it."""
        self.capabilities = Capabilities(name="s3", partial_status=False, md5_etags=False)
        self.server = ""
        """Name of the server in its last answer to GET by boto3: one server names itself differently in others."""
        self._deletes_alone = False
        """DeleteObjects was refused, as a policy may do that allows DeleteObject."""

    def adapt(self, capabilities: Capabilities) -> None:
        """Use the results of the probe; call it before any other thread uses the store."""
        self.capabilities = capabilities
        self.sender.adapt(capabilities)

    # -- reading -------------------------------------------------------------------------------------------------

    def get(self, key: str, start: int, end: int, *, etag: str | None = None) -> Fetched:
        """See `ObjectStore.get`. Raises Unavailable where the answer was not whole."""
        self._refuse_marker(key, NotFound)
        try:
            fetched = self._get(key, start, end, etag if self.capabilities.get_if_match else None)
        except RangeNotSatisfiable:
            meta = self.head(key)
            if etag is not None and meta.etag != etag:
                raise PreconditionFailed(f"{key!r} is another version now") from None
            if meta.size > start:
                raise Unavailable(f"get {key!r}: the store refused a range that it has") from None
            return Fetched(b"", meta)
        if etag is not None and fetched.meta.etag != etag:
            raise PreconditionFailed(f"{key!r} is another version now")
        return fetched

    def _get(self, key: str, start: int, end: int, etag: str | None) -> Fetched:
        if self.capabilities.partial_status and is_expressible(key):
            try:
                return self._fast.get(key, start, end, etag)
            except RangeIgnored:
                pass  # a server may answer so where the range is all of the object
        answer = self._get_object(key, start, end, etag)
        try:
            data, size = range_from_answer(answer, start, end)
        except StoreError:
            raise
        except Exception as error:
            raise from_boto(f"get {key!r}", error) from error
        return Fetched(data, _meta(key, size, answer))

    def observe_get(self, key: str, start: int, end: int, *, etag: str | None = None) -> tuple[int, int]:
        """See `NetworkStore.observe_get`. The body is read up to 64 KiB."""
        answer = self._get_object(key, start, end, etag)
        with answer["Body"] as stream:
            return int(answer["ResponseMetadata"]["HTTPStatusCode"]), len(stream.read(65_536))

    def _get_object(self, key: str, start: int, end: int, etag: str | None) -> Answer:
        condition = {} if etag is None else {"IfMatch": f'"{etag}"'}
        return self._call("get_object", f"get {key!r}", key, Range=f"bytes={start}-{end - 1}", **condition)

    def head(self, key: str) -> ObjectMeta:
        """See `ObjectStore.head`."""
        self._refuse_marker(key, NotFound)
        try:
            if is_expressible(key):
                return self._fast.head(key)
            answer = self._call("head_object", f"head {key!r}", key)
            return _meta(key, int(_told(answer, "ContentLength", f"head {key!r}")), answer)
        except StoreError as error:
            if type(error) is StoreError:
                # Answers to HEAD have no code: S3's 400 is that of an expired token, among others. GET's has one.
                self._get_object(key, 0, 1, None)["Body"].close()
            raise

    def through_cache(self, url: str) -> CachedGetter | None:
        """See `CacheableStore`."""
        if not self.capabilities.partial_status:
            return None
        return CachedGets(self.access, url, self._clock)

    @property
    def is_guarded(self) -> bool:
        """See `NetworkStore`."""
        return self.access.encrypted

    def has_md5_etag(self, key: str) -> bool:
        """See `NetworkStore.has_md5_etag`."""
        answer = self._call("head_object", f"head {key!r}", key)
        return not hides_md5(answer)

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        start_after: str = "",
        token: str | None = None,
        keys_max: int = 1000,
    ) -> ListPage:
        """See `ObjectStore.list_page`."""
        return self._pages.page(prefix, delimiter, start_after, token, keys_max)

    def list_level(self, place: str) -> ListPage:
        """The first page of names right below a prefix of the bucket, at or above the source's, relative to it. Raises
        as `list_page`."""
        return self._pages.page("", "/", "", None, 1000, lake=place)

    # -- writing -------------------------------------------------------------------------------------------------

    def put(
        self, key: str, body: Body, *, metadata: Mapping[str, str] | None = None, if_absent: bool = False,
        etag: str | None = None,
    ) -> ObjectMeta:  # fmt: skip
        """See `ObjectStore.put`. Where the store ignores preconditions, ``if_absent`` is a HEAD before the PUT."""
        self._refuse_key(key)
        what, size = f"put {key!r}", length_of(body)
        if if_absent and not self.capabilities.put_if_absent:
            self._refuse_existing(key)
            if_absent = False
        is_fast = self.sender.allows_fast_path(size) and self._fast.can_put(size, metadata)
        if is_fast and is_expressible(key):
            small = b"".join(body.pieces()) if isinstance(body, FileSlice) else body
            if self._limiter is not None:
                self._limiter.wait(size)
            meta = self._put_fast(key, small, metadata, if_absent=if_absent, etag=etag)
            if self.sender.compares_md5 and md5_of_sent(small) != meta.etag:
                raise Unavailable(f"{what}: the received bytes are not those that were sent")
            return meta if meta.etag else self._stored(what, key, size)
        parameters: dict[str, object] = {"Metadata": dict(metadata or {}), **self._class_parameter(key, size)}
        if if_absent:
            parameters["IfNoneMatch"] = "*"
        if etag is not None:
            parameters["IfMatch"] = f'"{etag}"'
        answer = self.sender.send("put_object", what, key, body, parameters, visible=True)
        new = etag_of(answer)
        if not new:
            return self._stored(what, key, size)
        return ObjectMeta(key, size, new, self._clock.wall_ns(), dict(metadata or {}))

    def _stored(self, what: str, key: str, size: int) -> ObjectMeta:
        """The object that an answer without an ETag is about, of ``size`` bytes. Raises Unavailable for another: what
        answered may not have been the store."""
        there = self.head(key)
        if there.size != size:
            raise Unavailable(f"{what}: an object of {there.size} bytes is there, and {size} were sent")
        return there

    def _put_fast(
        self, key: str, body: bytes, metadata: Mapping[str, str] | None, *, if_absent: bool, etag: str | None
    ) -> ObjectMeta:
        storage_class = self._storage_class(key, len(body))
        try:
            return self._fast.put(key, body, metadata, if_absent=if_absent, etag=etag, storage_class=storage_class)
        except PreconditionFailed as error:
            if if_absent or etag is not None:
                raise
            raise unconditional(error) from error

    def delete_if_match(self, key: str, etag: str) -> None:
        """See `NetworkStore`."""
        self._call("delete_object", f"delete {key!r}", key, IfMatch=f'"{etag}"')

    def delete(self, key: str, *, etag: str | None = None) -> None:
        """See `ObjectStore.delete`. Where the store ignores the condition, ``etag`` is a HEAD before the DELETE."""
        if self._is_foreign_marker(key):
            return
        conditional = etag is not None and self.capabilities.delete_if_match
        try:
            if etag is not None and not conditional:
                self._require_version(key, etag)
            parameters = {"IfMatch": f'"{etag}"'} if conditional else {}
            try:
                self._call("delete_object", f"delete {key!r}", key, **parameters)
            except PreconditionFailed:
                self.head(key)  # Some stores answer so where there is no object.
                raise
        except NotFound:
            return

    def delete_many(self, keys: Sequence[str]) -> Mapping[str, str]:
        """See `ObjectStore.delete_many`. Keys that XML cannot hold are deleted one by one, and so are all where
        DeleteObjects is refused."""
        failed: dict[str, str] = {}
        refused: list[str] = []
        keys = [key for key in keys if not self._is_foreign_marker(key)]
        one_by_one = self._deletes_alone or not self.capabilities.delete_many
        alone = [key for key in keys if one_by_one or not _XML_ILLEGAL.isdisjoint(key)]
        together = [key for key in keys if not one_by_one and _XML_ILLEGAL.isdisjoint(key)]
        if together:
            refused = self._delete_together(together, failed)
        for key in alone + refused:
            try:
                self.delete(key)
            except Unavailable:
                raise
            except LakeError as error:
                failed[key] = str(error)
        if refused and refused == together and failed.keys().isdisjoint(refused):
            self._deletes_alone = True  # these credentials may delete an object, and not several in one request
        return failed

    def _delete_together(self, keys: Sequence[str], failed: dict[str, str]) -> list[str]:
        """One DeleteObjects. Returns the keys for which it was refused; other failures go into ``failed``. Raises
        Unavailable where a key may be deleted later: the request is to be sent again."""
        batch = [{"Key": self._prefix + key} for key in keys]
        try:
            answer = self._call("delete_objects", "delete", None, Delete={"Objects": batch, "Quiet": True})
        except (AccessDenied, Unsupported):
            return list(keys)
        refused: list[str] = []
        for about in answer.get("Errors", ()):
            code, key = about.get("Code", ""), str(about.get("Key", ""))[len(self._prefix) :]
            if code == "AccessDenied":
                refused.append(key)
                continue
            error = from_answer(f"delete {key!r}", code, 200)
            if isinstance(error, Unavailable):
                raise Unavailable(str(error), throttled=error.throttled)
            if code not in ("NoSuchKey", "NotFound"):
                failed[key] = f"{code} {about.get('Message', '')}".strip()
        return refused

    def copy(self, source: str, target: str, *, etag: str | None = None) -> ObjectMeta:
        """See `ObjectStore.copy`. Asks for the target's HEAD too, as the answer to a copy has no size."""
        self._refuse_marker(source, NotFound)
        self._refuse_key(target)
        what, stored = f"copy {source!r} to {target!r}", self._class_parameter(target, None)
        answer = self._copy("copy_object", what, source, etag, target, **stored)
        if not etag_of(answer.get("CopyObjectResult", {})):
            raise Unsupported(f"{what}: the store answered without copying (CopyObject)")
        return self.head(target)

    def _copy(
        self, operation: str, what: str, source: str, etag: str | None, target: str, **parameters: object
    ) -> Answer:
        """A request whose source is an object. Where the store ignores conditions on it, a HEAD before and one after
        check its version."""
        parameters["CopySource"] = {"Bucket": self._bucket, "Key": self._prefix + source}
        checks = etag is not None and not self.capabilities.copy_if_match
        if etag is not None and not checks:
            parameters["CopySourceIfMatch"] = f'"{etag}"'
        if checks:
            self._require_version(source, etag)
        answer = self._call(operation, what, target, **parameters)
        if checks:
            self._require_version(source, etag)
        return answer

    # -- multipart -----------------------------------------------------------------------------------------------

    def create_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        """See `ObjectStore.create_multipart`."""
        self._refuse_key(key)
        parameters = {
            "Metadata": dict(metadata or {}),
            **self.sender.upload_parameters(),
            **self._class_parameter(key, None),
        }
        what = f"create upload {key!r}"
        return str(_told(self._call("create_multipart_upload", what, key, **parameters), "UploadId", what))

    def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> PartRef:
        """See `ObjectStore.upload_part`; a slice is streamed, in pieces of 1 MiB."""
        parameters: dict[str, object] = {"UploadId": upload_id, "PartNumber": number}
        what = f"upload part {number} of {key!r}"
        send = partial(self.sender.send, "upload_part", what, key, body, parameters, visible=False)
        try:
            answer = send()
        except (KeyRefused, StoreError) as error:
            if type(error) not in (KeyRefused, StoreError):
                raise
            # Perhaps the upload was begun by a mount that knew the store as one that does, or does not, check sums:
            # some stores insist that parts do as the upload said.
            answer = send(sums=not self.sender.sends_sums)
        return PartRef(number, etag_of(answer), length_of(body))

    def upload_part_copy(
        self, key: str, upload_id: str, number: int, source: str, start: int, end: int, *, etag: str | None = None
    ) -> PartRef:
        """See `ObjectStore.upload_part_copy`."""
        if not self.capabilities.part_copy:
            raise Unsupported("the store cannot copy a part (UploadPartCopy)")
        answer = self._copy(
            "upload_part_copy",
            f"copy part {number} of {key!r}",
            source,
            etag,
            key,
            UploadId=upload_id,
            PartNumber=number,
            CopySourceRange=f"bytes={start}-{end - 1}",
        )
        copied = etag_of(answer.get("CopyPartResult", {}))
        if not copied:
            # Some servers take the request for an upload of nothing and say 200.
            raise Unsupported("the store answered a part copy without copying (UploadPartCopy)")
        return PartRef(number, copied, end - start)

    def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[PartRef], *, if_absent: bool = False, etag: str | None = None
    ) -> ObjectMeta:
        """See `ObjectStore.complete_multipart`. The answer may have no metadata. Where the store ignores preconditions,
        ``if_absent`` is a HEAD before and one after, which finds an object that came between."""
        listed = [{"PartNumber": part.number, "ETag": f'"{part.etag}"'} for part in parts]
        parameters: dict[str, object] = {"UploadId": upload_id, "MultipartUpload": {"Parts": listed}}
        looks = if_absent and not self.capabilities.complete_if_absent
        if looks:
            self._refuse_existing(key)
        elif if_absent:
            parameters["IfNoneMatch"] = "*"
        if etag is not None:
            parameters["IfMatch"] = f'"{etag}"'
        what, size = f"complete {key!r}", sum(part.size for part in parts)
        new = etag_of(self._call("complete_multipart_upload", what, key, **parameters))
        if looks or not new or not self.capabilities.complete_etag:
            there = self.head(key) if new else self._stored(what, key, size)
            if looks and new and self.capabilities.complete_etag and there.etag != new:
                raise PreconditionFailed(f"{key!r} was created by another client at the same time")
            return there
        return ObjectMeta(key, size, new, self._clock.wall_ns())

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """See `ObjectStore.abort_multipart`."""
        try:
            self._call("abort_multipart_upload", f"abort {key!r}", key, UploadId=upload_id)
        except NotFound:
            return

    def list_multipart(self, prefix: str) -> Sequence[UploadRef]:
        """See `ObjectStore.list_multipart`."""
        found: list[UploadRef] = []
        markers: dict[str, object] = {}
        while True:
            try:
                answer = self._call(
                    "list_multipart_uploads", f"list uploads {prefix!r}", None, Prefix=self._prefix + prefix, **markers
                )
            except NotFound:
                return found  # how one server says that there are none
            for upload in answer.get("Uploads", ()):
                key = str(upload["Key"])
                if key.startswith(self._prefix + prefix):  # one server ignores the prefix
                    started_ns = int(upload["Initiated"].timestamp() * 1_000_000) * 1000
                    found.append(UploadRef(key[len(self._prefix) :], str(upload["UploadId"]), started_ns))
            next_markers = {
                "KeyMarker": answer.get("NextKeyMarker"),
                "UploadIdMarker": answer.get("NextUploadIdMarker"),
            }
            following = {name: marker for name, marker in next_markers.items() if marker}
            if not answer.get("IsTruncated") or "KeyMarker" not in following or following == markers:
                return found
            markers = following

    def time_ns(self) -> int:
        """See `ObjectStore.time_ns`. Raises Unsupported where answers have no Date."""
        try:
            answer: Answer = self._client.head_bucket(Bucket=self._bucket)
        except boto.ClientError as error:
            # Policies that allow a prefix only may refuse this; the refusal is dated all the same.
            answer = error.response
            if answer["ResponseMetadata"]["HTTPStatusCode"] != 403:
                raise from_boto("ask for the time", error) from error
        except RAISED_BY_BOTO as error:
            raise from_boto("ask for the time", error) from error
        try:
            date = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        except (KeyError, ValueError):
            raise Unsupported("the store's answers do not say when they were made (Date)") from None
        return int(date.timestamp()) * 1_000_000_000 + 500_000_000

    def close(self) -> None:
        """Close connections."""
        self.access.close()

    # -- how calls are made --------------------------------------------------------------------------------------

    def _call(self, operation: str, what: str, key: str | None, **parameters: object) -> Answer:
        if key is not None:
            parameters["Key"] = self._prefix + key
        try:
            answer: Answer = getattr(self._client, operation)(Bucket=self._bucket, **parameters)
        except RAISED_BY_BOTO as error:
            if isinstance(cause := wrapped(error), FileError):  # of the body's file
                raise cause from error
            failure = from_boto(what, error, signed=not self.access.config.unsigned)
            raise (unconditional(failure) if _CONDITIONS.isdisjoint(parameters) else failure) from error
        if operation == "get_object":
            self.server = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("server", "")
        return answer

    def _storage_class(self, key: str, size: int | None) -> str:
        return storage_class_of(self.access.config, key, size)

    def _class_parameter(self, key: str, size: int | None) -> dict[str, object]:
        """For the requests that make an object."""
        name = self._storage_class(key, size)
        return {"StorageClass": name} if name else {}

    def _require_version(self, key: str, etag: str | None) -> None:
        """Check what the store itself does not. Raises PreconditionFailed, NotFound."""
        if self.head(key).etag != etag:
            raise PreconditionFailed(f"{key!r} is another version now")

    def _refuse_existing(self, key: str) -> None:
        try:
            self.head(key)
        except NotFound:
            return
        raise PreconditionFailed(f"{key!r} exists")

    def _refuse_key(self, key: str) -> None:
        self._refuse_marker(key, KeyRefused)
        for character in self.capabilities.characters_refused:
            if character in key:
                raise KeyRefused(f"{key!r}: the store would turn {character!r} into something else")

    def _is_foreign_marker(self, key: str) -> bool:
        """Where ``dir/`` is not a key of its own, it must not be used: the store takes it for the file ``dir``."""
        return key.endswith("/") and not self.capabilities.lists_markers

    def _refuse_marker(self, key: str, kind: type[LakeError]) -> None:
        if self._is_foreign_marker(key):
            raise kind(f"{key!r}: the store has no directory markers")


def _told(answer: Answer, name: str, what: str) -> Any:
    """What every answer to the request has. Raises Unavailable where it is missing: the answer is not the store's."""
    if name not in answer:
        raise Unavailable(f"{what}: the answer has no {name}: see whether a proxy changes it")
    return answer[name]


def _meta(key: str, size: int, answer: Answer) -> ObjectMeta:
    # One server answers X-Amz-Meta-Mode where mode was put: names of headers have no case.
    metadata = {str(name).lower(): str(value) for name, value in answer.get("Metadata", {}).items()}
    modified = answer.get("LastModified")
    mtime_ns = int(modified.timestamp()) * 1_000_000_000 if modified is not None else 0
    return ObjectMeta(key, size, etag_of(answer), mtime_ns, metadata)


def range_from_answer(answer: Mapping[str, Any], start: int, end: int) -> tuple[bytes, int]:
    """Bytes [start, end) cut at the object's end, and the object's size. ``answer`` is get_object's.

    Raises Unavailable where the body is not what the headers say; reads, and keeps, no more than is needed.
    """
    with answer["Body"] as stream:
        described = _CONTENT_RANGE.fullmatch(str(answer.get("ContentRange") or ""))
        length = int(answer["ContentLength"])
        if described is not None:
            first, last, size = (int(group) for group in described.groups())
            due = min(end, size) - start
            if first != start or last + 1 - first != due or length != due:
                raise Unavailable(f"bytes {first} to {last + 1} came where {start} to {min(end, size)} were due")
            data: bytes = stream.read()
        else:
            # Without Content-Range it is the whole object, and we stop reading where our range ends.
            size = length
            due = max(0, min(end, size) - start)
            _skip(stream, min(start, size))
            data = stream.read(due) if due else b""
    if len(data) != due:
        raise Unavailable(f"{len(data)} bytes came where {due} were due")
    return data, size


def _skip(stream: Any, count: int) -> None:
    while count > 0:
        piece = stream.read(min(SKIP_BYTES, count))
        if not piece:
            return
        count -= len(piece)


def open_s3(
    config: StoreConfig, clock: Clock, limiter: RateLimiter | None, *, tries_s_max: float = math.inf
) -> S3Store:
    """Connect, and list one key: that needs the bucket and the credentials to be right. A bucket in another region is
    followed there once; a store that does not answer is asked again for ``tries_s_max``. Raises as
    `lakefs_fuse.store.open.open_store`; the message says what to do."""
    access = connect(config, clock)
    try:
        try:
            return _opened(access, clock, limiter, tries_s_max)
        except WrongRegion as error:
            if error.region in ("", access.region):
                raise
            _log.warning(
                "bucket %r is in region %s, not in %s, and is asked there: give --region %s, or set AWS_DEFAULT_REGION",
                config.source.bucket, error.region, access.region, error.region,
            )  # fmt: skip
            access = connect(structs.replace(config, region=error.region), clock)
        return _opened(access, clock, limiter, tries_s_max)
    except StoreError as error:
        raise _advice(config, access.base_url, error) from error


def _opened(access: S3Access, clock: Clock, limiter: RateLimiter | None, tries_s_max: float) -> S3Store:
    store = S3Store(access, clock, limiter)
    try:
        retry_unavailable(lambda: store.list_page("", keys_max=1), clock, tries_s_max=tries_s_max)
    except BaseException:
        store.close()
        raise
    return store


def follow_region(access: S3Access, clock: Clock) -> S3Access:
    """The bucket in the region that it is in, which one LIST finds out. Any other failure of that is left for the next
    request to tell. Raises as `connect`."""
    try:
        S3Pages(access).page("", "", "", None, 1)
    except WrongRegion as error:
        if error.region not in ("", access.region):
            access.close()
            return connect(structs.replace(access.config, region=error.region), clock)
    except StoreError:
        pass
    return access


def _advice(config: StoreConfig, base_url: str, error: StoreError) -> Exception:
    bucket = config.source.bucket
    if isinstance(error, NoSuchBucket | NotFound):
        return NoSuchBucket(f"bucket {bucket!r} does not exist at {base_url}: create it, or check --endpoint-url")
    if type(error) is StoreError and config.unsigned:  # as rclone answers
        return AccessDenied(
            f"bucket {bucket!r} at {base_url}: the store does not let everybody list it ({error}): leave out "
            "--unsigned, and give credentials"
        )
    if isinstance(error, AccessDenied):
        return AccessDenied(f"bucket {bucket!r} at {base_url}: access denied: {error}")
    if isinstance(error, Unavailable):
        return Unavailable(f"{base_url} cannot be {'used now' if error.throttled else 'reached'}: {error}")
    if isinstance(error, WrongRegion):
        return ConfigError(f"bucket {bucket!r}: {error}")
    return type(error)(f"bucket {bucket!r} at {base_url}: {error}")
