"""POSIX attributes in object metadata, under the keys and in the forms that s3fs and rclone use.

Written: ``mode`` (st_mode, decimal), ``uid``, ``gid``, ``mtime`` (seconds since 1970 with nine decimals), as s3fs does;
rclone reads the same ``mtime``. Read: those, and rclone's octal ``mode`` and RFC 3339 ``mtime``. What cannot be
understood is left out: any client may have written the metadata.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from lakefs_fuse.config import MountConfig
from lakefs_fuse.meta.entry import MTIME_NS_MAX, MTIME_NS_MIN, UNSET, Entry, Flag

NS = 1_000_000_000
PERMISSIONS = 0o7777
MTIME = "mtime"
MODE_MAX = 0o177777
DIGITS_MAX = 12
"""More digits than any valid number has."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def without_privileges(mode: int) -> int:
    """Return a file's mode after a write or a change of owner: without suid, and with sgid only if the group may not
    execute it."""
    return mode & ~(stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0))


def shown(config: MountConfig) -> tuple[int, int, int]:
    """Return mode, uid and gid of files whose objects have none."""
    return config.file_mode, config.default_uid, config.default_gid


def describe(entry: Entry) -> dict[str, str]:
    """Return the metadata of a file's object."""
    described = {}
    if entry.mode != UNSET:
        described["mode"] = str(stat.S_IFREG | entry.mode)
    if entry.uid != UNSET:
        described["uid"] = str(entry.uid)
    if entry.gid != UNSET:
        described["gid"] = str(entry.gid)
    sign, ns = "-" if entry.mtime_ns < 0 else "", abs(entry.mtime_ns)
    described[MTIME] = f"{sign}{ns // NS}.{ns % NS:09d}"
    return described


def learn(entry: Entry, metadata: Mapping[str, str]) -> Entry:
    """Return the entry with the attributes in its object's metadata. They count as known, even if there are none."""
    mode, mtime_ns = _mode(metadata.get("mode", "")), _mtime_ns(metadata.get(MTIME, ""))
    uid, gid = _number(metadata.get("uid", "")), _number(metadata.get("gid", ""))
    return msgspec.structs.replace(
        entry,
        flags=entry.flags | Flag.ATTRIBUTES_KNOWN | (0 if mtime_ns is None else Flag.MTIME_KEPT),
        mode=entry.mode if mode is None else mode,
        uid=entry.uid if uid is None else uid,
        gid=entry.gid if gid is None else gid,
        mtime_ns=entry.mtime_ns if mtime_ns is None else mtime_ns,
    )


def _number(text: str) -> int | None:
    return int(text) if _is_decimal(text, DIGITS_MAX) and int(text) < UNSET else None


def _is_decimal(text: str, digits_max: int) -> bool:
    """Return whether a text is a decimal number. Other programs may store thousands of digits, which int() refuses."""
    return text.isascii() and text.isdigit() and len(text) <= digits_max


def _mode(text: str) -> int | None:
    """Return the permissions of a mode. s3fs writes it in decimal, and rclone in octal, sometimes without a leading
    zero: then the file type bits distinguish the two."""
    if not _is_decimal(text, DIGITS_MAX):
        return None
    octal = int(text, 8) if all(digit in "01234567" for digit in text) else None
    if octal is not None and (text.startswith("0") or stat.S_IFMT(octal) in (stat.S_IFREG, stat.S_IFDIR)):
        decimal_type = stat.S_IFMT(int(text)) if int(text) <= MODE_MAX else 0
        if text.startswith("0") or decimal_type not in (stat.S_IFREG, stat.S_IFDIR):
            return octal & PERMISSIONS
    return int(text) & PERMISSIONS


def _mtime_ns(text: str) -> int | None:
    whole, _, fraction = text.partition(".")
    negative = whole.startswith("-")
    if _is_decimal(whole.removeprefix("-"), DIGITS_MAX) and (fraction == "" or _is_decimal(fraction, len(fraction))):
        ns = int(whole.removeprefix("-")) * NS + int(fraction[:9].ljust(9, "0") or 0)
        return _within_limits(-ns if negative else ns)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return _within_limits((moment - EPOCH) // MICROSECOND * 1000)


def _within_limits(ns: int) -> int | None:
    return ns if MTIME_NS_MIN <= ns <= MTIME_NS_MAX else None
