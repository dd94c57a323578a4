"""What a mount exposes to others, by its configuration and the environment: sentences for `mount --explain`.

They say what others on the network, or another user of this machine, could read or change, and what prevents it.
Changes nothing.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from lakefs_fuse.config import MountConfig


def exposures(config: MountConfig, endpoint: str, environment: Mapping[str, str]) -> Iterator[str]:
    """What is not secure, one sentence each. ``endpoint`` is the URL of the store, empty where there is none."""
    yield from _network(config, endpoint)
    yield from _users(config)
    yield from _files(config, environment)


def _network(config: MountConfig, endpoint: str) -> Iterator[str]:
    if _is_open(endpoint, "http"):
        yield (
            f"the store is reached over http ({urlsplit(endpoint).hostname}): others on the way can read all bytes; "
            "use an https endpoint"
        )
    for url in config.cluster_cache:
        if _is_open(url, "http"):
            yield f"{url} is reached over http: others on the way can read bytes and its password; use https"
    if config.trust_cluster_cache:
        yield (
            "--trust-cluster-cache: anyone who can change the contents of the proxies can change files here; omit it "
            "unless that is only you"
        )
    if _is_open(config.hints, "redis"):
        yield "--hints is not encrypted: others on the way can read its password; use rediss://"


def _is_open(url: str, scheme: str) -> bool:
    """Whether a URL names another machine without TLS."""
    parts = urlsplit(url)
    if parts.scheme != scheme or not parts.hostname:
        return False
    try:
        return not ipaddress.ip_address(parts.hostname).is_loopback
    except ValueError:
        return parts.hostname != "localhost"


def _users(config: MountConfig) -> Iterator[str]:
    if not config.allow_other:
        return
    yield (
        "--allow-other: every user of this machine can enter the mount, and modes alone decide; objects that store "
        f"none have {config.file_mode:o} (--file-mode)"
    )
    if config.file_mode & 0o002 or config.dir_mode & 0o002:
        yield "--file-mode or --dir-mode lets every user of this machine write: clear the bits 002"


def _files(config: MountConfig, environment: Mapping[str, str]) -> Iterator[str]:
    directory = Path(config.cache_dir)
    if (mode := _mode_of(directory)) is not None and mode & 0o077:
        yield (
            f"the cache directory {directory} is open to others (mode {mode:04o}), and holds bytes of the lake: the "
            "mount closes it (mode 0700)"
        )
    if config.log_file and (mode := _mode_of(Path(config.log_file))) is not None and mode & 0o077:
        yield f"the log {config.log_file} can be read by others, with names of files: run `chmod 600 {config.log_file}`"
    home = Path(environment.get("HOME") or "~").expanduser()
    keys = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials")
    if (mode := _mode_of(keys)) is not None and mode & 0o077:
        yield f"{keys} holds credentials and can be read by others: run `chmod 600 {keys}`"


def _mode_of(path: Path) -> int | None:
    """Permission bits; None where nothing is there."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode)
    except OSError:
        return None
