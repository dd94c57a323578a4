"""The configuration of a mount, checked once and frozen: every bound has a name, a unit and a default here.

*No secrets*: credentials come from boto3's own chain only.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from lakefs_fuse.errors import ConfigError
from lakefs_fuse.product import RESERVED_NAME

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

PACK_MODES = ("auto", "always", "never")
PACK_THRESHOLD_BYTES_MAX = 64 * MIB
"""Size of a full pack: a larger file gains nothing from being in one."""
REFRESH_S_MIN = 0.1
DELETE_AFTER_S = 300.0
"""Longer than a commit may come late (WINDOW_NS) with what its writer had not heard of, twice."""
DURABILITIES = ("close", "writeback")
EXCLUSIVE_CREATES = ("store", "cache")
PUBLISH_S_MIN = 1.0
"""Each costs a request to the store for each file."""
HARD_LINKS = ("auto", "local", "refuse")
MAINTENANCE = ("auto", "off")

MEMORY_BYTES_MIN = 192 * MIB
"""An idle mount takes 90 MiB."""
CACHE_BYTES_MIN = 16 * MIB
"""Sixteen blocks. A number without a unit is in bytes, so less is a mistake."""
STAGING_BYTES_MIN = 48 * MIB
"""Three parts of an upload: the kernel writes a large file out in two of them, while one is sent. With 32 MiB a file of
150 MiB was refused, with 48 MiB one of 400 MiB was stored."""

SIZE_BYTES_MAX = 1 << 62
_SIZE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _SIZE_UNITS[_letter] = _SIZE_UNITS[_letter + "ib"] = 1024**_power
    _SIZE_UNITS[_letter + "b"] = 1000**_power
_DURATION_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DURATION_S_MAX = 10 * 365 * 86400.0
_DATASET_CHARACTERS, _VERSION_DIGITS = "[A-Za-z0-9][A-Za-z0-9._-]{0,79}", "[1-9][0-9]{0,8}"
VERSION_MAX = 10**9 - 1
"""Of a dataset: the largest number of so many digits (`docs/format.md`)."""
_DATASET = re.compile(f"({_DATASET_CHARACTERS})(?:@({_VERSION_DIGITS}))?")
_DATASET_SNAPSHOT = re.compile(rf"({_DATASET_CHARACTERS})\.v({_VERSION_DIGITS})")
_BUCKET = re.compile("[A-Za-z0-9._-]{1,255}")
"""What boto3 sends as the name of a bucket."""
_UNFIT_FOR_URL = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_SSE = re.compile(r"s3|kms(:[A-Za-z0-9:/_.-]{1,2048})?")
_STORAGE_CLASS = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ARCHIVE_CLASSES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
"""Classes whose objects have to be restored before they can be read."""
_NUMBER_AND_UNIT = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes: ``10GiB``, ``500M`` (a bare unit letter is binary), ``1073741824``. Raises ConfigError."""
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    factor = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not a size: expected for example 10GiB, 500M or 1073741824")
    size = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if size > SIZE_BYTES_MAX:
        raise ConfigError(f"{text!r} is more than any disk holds")
    return size


def parse_duration(text: str) -> float:
    """Seconds: ``60``, ``1.5s``, ``5m``, ``2h``, ``7d``. Raises ConfigError."""
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    factor = _DURATION_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not a duration: expected for example 60, 1.5s, 5m or 2h")
    seconds = float(match[1]) * factor
    if seconds > DURATION_S_MAX:
        raise ConfigError(f"{text!r} is more than ten years")
    return seconds


def parse_cluster_cache(text: str) -> tuple[str, ...]:
    """URLs of caching proxies: ``http://cache-1:8080,http://cache-2:8080``; ``;`` separates them, too. Raises
    ConfigError, whose message does not repeat what may be a password."""
    urls = [url.strip().rstrip("/") for url in re.split("[,;]", text) if url.strip()]
    for url in urls:
        if "@" in url:
            raise ConfigError("a cluster cache's URL must not hold a password: put it in LAKEFS_CLUSTER_CACHE_TOKEN")
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a cluster cache: expected for example http://cache-1:8080") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path or parts.query or parts.fragment:
            raise ConfigError(f"{url!r} is not a cluster cache: expected for example http://cache-1:8080")
    if not urls:
        raise ConfigError(f"{text!r} names no proxy: expected for example http://cache-1:8080")
    return tuple(dict.fromkeys(urls))


def parse_sse(text: str) -> str:
    """``s3``, ``kms`` or ``kms:KEY-ID`` of server-side encryption. Raises ConfigError."""
    if _SSE.fullmatch(text) is None:
        raise ConfigError(f"{text!r} is not an encryption: expected s3, kms or kms:KEY-ID")
    return text


def parse_storage_class(text: str) -> str:
    """The name of a storage class whose objects can be read at once. Raises ConfigError."""
    if _STORAGE_CLASS.fullmatch(text) is None:
        raise ConfigError(f"{text!r} is not a storage class: expected for example STANDARD_IA or INTELLIGENT_TIERING")
    if text.upper() in ARCHIVE_CLASSES:
        raise ConfigError(f"{text} is an archive, whose objects cannot be read at once: choose for example GLACIER_IR")
    return text


def _check_reserved(url: str, path: str) -> None:
    """Raises ConfigError for a place among the objects that a lake keeps for itself."""
    if RESERVED_NAME in path.split("/"):
        raise ConfigError(f"source {url}: {RESERVED_NAME} is reserved for the lake that it is in: name the lake")


class Source(msgspec.Struct, frozen=True):
    """A lake: ``s3://bucket/prefix`` or ``file:///dir``. ``prefix`` is empty or ends in ``/``."""

    scheme: str
    bucket: str
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Source:
        """The source that ``url`` names. Raises ConfigError, with the accepted forms."""
        if _UNFIT_FOR_URL.search(url):  # urlsplit leaves out tabs and newlines, which names another directory
            raise ConfigError(f"source {url!r} has control characters or is not UTF-8: give it another name")
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigError(f"source {url!r}: {error}: expected s3://bucket/prefix or file:///dir") from error
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise ConfigError(f"source {parts.scheme}://…: only s3://bucket/prefix and file:///dir, nothing after it")
        if parts.scheme == "s3" and parts.netloc.startswith("arn:"):
            raise ConfigError(f"source {url}: give the alias of the access point in place of its ARN: s3://…-s3alias")
        if parts.scheme == "s3" and parts.netloc:
            prefix = parts.path.strip("/")
            if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
                raise ConfigError(f"source {url}: the prefix has an empty, '.' or '..' component")
            _check_reserved(url, prefix)
            if _BUCKET.fullmatch(parts.netloc) is None:
                raise ConfigError(f"source {url}: a bucket's name has letters, digits, '.', '-' and '_' only")
            return cls("s3", parts.netloc, prefix + "/" if prefix else "")
        if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
            _check_reserved(url, parts.path)
            if ".." in parts.path.split("/"):
                raise ConfigError(f"source {url}: the path has a '..' component: give the path without it")
            return cls("file", str(Path(parts.path)), "")
        hint = f"; write a local directory as file://{url}" if url.startswith("/") else ""
        raise ConfigError(f"source {url!r}: expected s3://bucket, s3://bucket/prefix or file:///absolute/dir{hint}")

    def __str__(self) -> str:
        return f"file://{self.bucket}" if self.scheme == "file" else f"s3://{self.bucket}/{self.prefix}"


class DatasetName(msgspec.Struct, frozen=True):
    """A dataset, and one version of it, from 1 to VERSION_MAX; 0 where none is said. Raises ConfigError for others."""

    name: str
    version: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.version <= VERSION_MAX:
            raise ConfigError(f"{self.name}@{self.version}: versions are numbers from 1 to {VERSION_MAX}")

    @classmethod
    def parse(cls, text: str) -> DatasetName:
        """``imagenet@3``, or ``imagenet``. Raises ConfigError."""
        match = _DATASET.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"{text!r} is not a dataset: expected NAME or NAME@VERSION, such as imagenet@3, of letters, digits, "
                "'.', '_' and '-', at most 80 and a letter or digit first, and a number from 1 to 999999999"
            )
        return cls(match[1], int(match[2] or 0))

    @classmethod
    def parse_version(cls, text: str) -> DatasetName:
        """As `parse`, of one version. Raises ConfigError."""
        found = cls.parse(text)
        if not found.version:
            raise ConfigError(f"{text} has no version: say which, such as {text}@1 (`lakefs-fuse dataset ls SOURCE`)")
        return found

    @classmethod
    def of_snapshot(cls, snapshot: str) -> DatasetName | None:
        """The version that a named snapshot may be, judged by its name."""
        match = _DATASET_SNAPSHOT.fullmatch(snapshot)
        return None if match is None else cls(match[1], int(match[2]))

    @property
    def snapshot(self) -> str:
        """Name of the snapshot that the version is: one that programs without datasets keep as well."""
        return f"{self.name}.v{self.version}"

    def __str__(self) -> str:
        return f"{self.name}@{self.version}" if self.version else self.name


QUICK_READ_TIMEOUT_S_MIN = 5.0
"""A store under load may take seconds for a LIST, so a shorter ``--retry-timeout`` does not shorten an attempt."""


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the store."""

    source: Source
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing_style: str = "auto"
    """``auto``, ``path`` or ``virtual``, as botocore names them."""
    ca_bundle: str | None = None
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    """Time after which a stalled response to a large upload, a copy or a completion counts as a lost connection."""
    retry_timeout_s: float = 60.0
    """Time for which a failing request is retried before its error is returned."""
    requests_max: int = 32
    """Concurrent store requests, besides uploads of parts."""
    unsigned: bool = False
    """Requests carry no signature, and no credentials are looked up: the store is asked as anybody may ask it."""
    requester_pays: bool = False
    """Each request says that its sender pays for it."""
    sse: str = ""
    """Encryption of what is stored: ``s3``, ``kms`` or ``kms:KEY-ID``; empty leaves it to the bucket."""
    storage_class: str = ""
    """Of the files that are stored; empty leaves it to the store."""

    @property
    def quick_read_timeout_s(self) -> float:
        """As ``read_timeout_s``, for all other requests: a whole number of attempts takes ``retry_timeout_s`` if the
        store is silent, so that the last attempt does not end long after it."""
        attempts = max(1, math.ceil(self.retry_timeout_s / self.read_timeout_s))
        return min(self.read_timeout_s, max(QUICK_READ_TIMEOUT_S_MIN, self.retry_timeout_s / attempts))

    @property
    def meant(self) -> tuple[str, str, str]:
        """The identity of a lake: source, endpoint and profile, the last two from the environment if not given."""
        endpoint = self.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return str(self.source), endpoint or "", self.profile or os.environ.get("AWS_PROFILE") or ""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for paths that match ``path``, a glob of `lakefs_fuse.path_rules`; None leaves a setting as it was."""

    path: str
    pack: str | None = None
    pack_threshold_bytes: int | None = None
    durability: str | None = None
    keep_newest: int | None = None
    exclusive_create: str | None = None
    publish_s: float | None = None


class MountConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One mount of one lake on this node."""

    store: StoreConfig
    mountpoint: str
    cache_dir: str
    cache_bytes_max: int = 20 * GIB
    cluster_cache: tuple[str, ...] = ()
    """URLs of caching proxies, the same on all nodes, that are asked for blocks before the store."""
    trust_cluster_cache: bool = False
    """Use blocks of ``cluster_cache`` that no checksum proves."""
    free_bytes_min: int = 1 * GIB
    """Disk space that cache and staging leave free."""
    staging_bytes_max: int = 10 * GIB
    metadata_ttl_s: float = 60.0
    read_only: bool = False
    allow_other: bool = False
    uid: int | None = None
    gid: int | None = None
    file_mode: int = 0o644
    dir_mode: int = 0o755
    uploads_max: int = 8
    """Concurrent uploads of parts and of small objects."""
    log_file: str | None = None
    log_level: str = "INFO"
    foreground: bool = False
    attributes: str = "listing"
    """Where mode, owner and mtime of objects not opened here yet come from: ``listing`` (defaults and LastModified) or
    ``objects`` (one HEAD for each, once, before it is shown)."""
    orphans: str = "keep"
    """What to do with files that a dead daemon left unfinished: ``keep`` (list them), ``finish`` or ``abort``."""
    pack: str = "auto"
    """Whether files up to ``pack_threshold_bytes`` share packs: ``auto`` (where several close together), ``always`` or
    ``never``. ``rules`` may say otherwise for some paths."""
    pack_threshold_bytes: int = 1 * MIB
    refresh_s: float = 5.0
    """Interval at which the store is polled for commits of other nodes; at least REFRESH_S_MIN."""
    hints: str = ""
    """URL of a Redis over which mounts tell each other of commits; empty is none."""
    foreign_s: float | None = None
    """Interval at which a directory is listed again for what other programs than mounts put there; None: after
    ``metadata_ttl_s``, and ever more rarely where they put nothing and a LIST is for one directory alone."""
    rules: tuple[Rule, ...] = ()
    """In the order of their file, which only the command line reads."""
    delete_after_s: float = DELETE_AFTER_S
    """Time for which an object whose name is gone stays: mounts that have not heard of that may still rename it."""
    durability: str = "close"
    """What close() waits for: ``close``, the store; ``writeback``, the local disk. ``rules`` may say otherwise."""
    hard_links: str = "auto"
    """link(2): ``auto``, where the store keeps two nodes from linking one name, else EPERM; ``local``, also where only
    this node is kept from it; ``refuse``, always EPERM."""
    writeback_delay_s: float = 2.0
    """Time for which acknowledged files wait for others to share a pack with."""
    publish_s: float = 0.0
    """Interval at which a file that is still being written is stored; 0 is never. ``rules`` may say otherwise."""
    staging_timeout_s: float = 3600.0
    """Time for which a writer waits for room in staging before ENOSPC."""
    upload_bytes_s_max: int = 0
    """Maximum bytes per second of all uploads; 0 is no limit."""
    download_bytes_s_max: int = 0
    """Maximum bytes per second that reads fetch from the store; 0 is no limit."""
    memory_bytes_max: int = 384 * MIB
    """Resident memory that the daemon's caches and buffers are sized for; at least MEMORY_BYTES_MIN."""
    maintenance: str = "auto"
    """Whether this mount folds and collects its lake when it is due: ``auto``, unless it is read-only, or ``off``."""
    supervise: bool = True
    """Restart a daemon that dies, and replace its mount."""
    immutable: bool = False
    """Show the lake as it was at mount or at the last refresh, read-only."""
    snapshot: str = ""
    """With ``immutable``: show the state of this named snapshot."""
    dataset: str = ""
    """With ``immutable``: show this version of a dataset, whose snapshot is ``snapshot``."""
    records_residency: bool = False
    """Tell the store how much of ``dataset`` is on this node: its only PUTs."""
    folds: bool = False
    """Of a command that writes the index, not of a mount: keep what changes since the newest one."""
    mounting: str = ""
    """Of an immutable mount: the id of its `mount` command. A restarted daemon shows the same state."""

    @property
    def default_uid(self) -> int:
        """The owner of files whose owner was never set."""
        return os.getuid() if self.uid is None else self.uid

    @property
    def default_gid(self) -> int:
        """The group of files whose group was never set."""
        return os.getgid() if self.gid is None else self.gid
