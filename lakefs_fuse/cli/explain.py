"""`lakefs-fuse mount --explain`: what a mount would do, without making it.

It prints every option with its value and origin; the capabilities of the store, and the kernel features that will be
used (both from the child process `daemon.diagnosis`); what would make `mount` fail; what is not secure. Nothing is
changed, and a store that cannot be reached is part of the result.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import stat
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import msgspec
from click.core import ParameterSource
from msgspec import structs

from lakefs_fuse.cli import preflight
from lakefs_fuse.cli.parameters import value_text
from lakefs_fuse.cli.redaction import Redactor
from lakefs_fuse.cli.stats_values import section
from lakefs_fuse.cli.terminal import escaped, print_json
from lakefs_fuse.cli.worker import DIAGNOSIS, run_child
from lakefs_fuse.config import MountConfig, StoreConfig
from lakefs_fuse.control.worker_protocol import Diagnosis
from lakefs_fuse.errors import LakeError
from lakefs_fuse.product import ENVIRONMENT_PREFIX

NOT_OPTIONS = frozenset({"mount_o", "print_systemd_unit", "explain", "as_json"})
"""Parameters of `mount` that do not describe a mount."""
_OF_BOTO: Mapping[str, tuple[str, ...]] = {
    "endpoint_url": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "region": ("AWS_DEFAULT_REGION",),
    "profile": ("AWS_DEFAULT_PROFILE", "AWS_PROFILE"),
    "ca_bundle": ("AWS_CA_BUNDLE",),
}
"""Variables that boto3 reads where an option is not given, the first of them that is set."""
_VARIABLES = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "http_proxy", "https_proxy", "no_proxy",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip

FIELDS_OF_STORE = frozenset(StoreConfig.__struct_fields__)
_UNSET = {
    "uid": "yours", "gid": "yours", "foreign_s": "auto", "log_file": "standard error", "endpoint_url": "that of boto3",
    "region": "that of boto3", "profile": "that of boto3", "ca_bundle": "that of boto3",
    "sse": "that of the bucket", "storage_class": "that of the store",
}  # fmt: skip
TEXT_CHARS_MAX = 48
"""Longer values push their origin aside."""


class OptionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One option of a mount. ``value`` is in the unit of its field in config.py, ``text`` as one types it."""

    option: str
    value: object
    text: str
    origin: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a mount would do. Names are final once released."""

    source: str
    mountpoint: str
    options: list[OptionRow]
    environment: list[str]
    """Variables that are set and that a mount reads, by name."""
    store: Mapping[str, object]
    kernel: Mapping[str, object]
    refused: list[str]
    """Why `mount` would refuse, one sentence each."""
    not_secure: list[str]


def explain(config: MountConfig, context: click.Context, origin_of: Callable[[str], str], *, as_json: bool) -> None:
    """Print what a mount of ``config``, which came from ``context``, would do. ``origin_of`` returns the origin of a
    field that the command line did not set; empty for a default."""
    answer = run_child(DIAGNOSIS, Diagnosis(explains=config), command="mount --explain").summary
    store, kernel = section(answer, "store"), {"release": platform.release(), **section(answer, "kernel")}
    redactor = Redactor([])
    rows = list(option_rows(config, context, origin_of, store))
    explanation = Explanation(
        source=str(config.store.source),
        mountpoint=config.mountpoint,
        options=[structs.replace(row, text=redactor.redact(row.text), value=_redacted(redactor, row)) for row in rows],
        environment=sorted(name for name in os.environ if name in _VARIABLES or name.startswith(ENVIRONMENT_PREFIX)),
        store=store,
        kernel=kernel,
        refused=list(_refusals(config)),
        not_secure=list(exposures(config, str(store.get("endpoint") or ""), os.environ)),
    )
    if as_json:
        print_json(explanation)
    else:
        for line in lines_of(explanation):
            click.echo(escaped(line))


def option_rows(
    config: MountConfig, context: click.Context, origin_of: Callable[[str], str], store: Mapping[str, object]
) -> Iterator[OptionRow]:
    """Every option of the command with its value in ``config``. ``store`` has what boto3 made of some."""
    for param in context.command.params:
        name = param.name or ""
        if not isinstance(param, click.Option) or name in NOT_OPTIONS:
            continue
        value: Any = getattr(config.store if name in FIELDS_OF_STORE else config, name, context.params.get(name))
        origin = "default"
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            origin = "command line"
        elif given := origin_of(name):
            origin = given
        elif variable := next((each for each in _OF_BOTO.get(name, ()) if os.environ.get(each)), ""):
            value, origin = os.environ[variable], f"environment ({variable})"
        elif value is None and name == "region" and store.get("region"):
            value, origin = store["region"], "~/.aws/config, or the default of boto3"
        yield OptionRow(option=param.opts[0], value=msgspec.to_builtins(value), text=_text(name, value), origin=origin)


def _text(name: str, value: Any) -> str:
    if value is None or value in ("", ()):
        return _UNSET.get(name, "none")
    if isinstance(value, bool):
        return "on" if value else "off"
    if name == "rules":
        return f"{len(value)} rules"
    return ",".join(map(str, value)) if isinstance(value, tuple) else value_text(name, value)


def _redacted(redactor: Redactor, row: OptionRow) -> object:
    return redactor.redact(row.value) if isinstance(row.value, str) else row.value


def _refusals(config: MountConfig) -> Iterator[str]:
    """The errors that `preflight` finds; the cache directory is not made."""
    host = preflight.Host.this()
    checks: tuple[Callable[[], None], ...] = (
        partial(preflight.check_overlap, config),
        partial(preflight.check_mountpoint, config.mountpoint, host),
        partial(preflight.check_fuse, config, host),
        partial(preflight.check_cache_disk, config, host),
        partial(preflight.require_own_cache, Path(config.cache_dir)),
        partial(preflight.check_room, config),
    )
    for check in checks:
        try:
            check()
        except LakeError as error:
            yield str(error)


def lines_of(explanation: Explanation) -> Iterator[str]:
    """The explanation as it is printed."""
    yield f"{explanation.source} on {explanation.mountpoint}"
    yield ""
    yield "options"
    widths = [max(len(row.option) for row in explanation.options), max(len(row.text) for row in explanation.options)]
    widths[1] = min(widths[1], TEXT_CHARS_MAX)
    for row in explanation.options:
        yield f"  {row.option:{widths[0]}}  {row.text:{widths[1]}}  {row.origin}"
    if explanation.environment:
        yield f"  set in the environment: {', '.join(explanation.environment)}"
    yield ""
    yield "store"
    yield from (f"  {line}" for line in _lines_of_store(explanation.store))
    yield ""
    yield "kernel"
    yield from (f"  {line}" for line in _lines_of_kernel(explanation.kernel))
    yield ""
    yield "would be refused" if explanation.refused else "nothing on this machine would refuse the mount"
    yield from (f"  {line}" for line in explanation.refused)
    yield ""
    yield "not secure" if explanation.not_secure else "nothing is known to be insecure"
    yield from (f"  {line}" for line in explanation.not_secure)


def _lines_of_store(store: Mapping[str, object]) -> Iterator[str]:
    if "endpoint" in store:
        proxied = ", through a proxy" if store.get("proxied") else ""
        yield f"{store['endpoint']}, region {store['region']}{proxied}"
        yield f"credentials {store.get('credentials', '')}"
    if "error" in store:
        yield f"cannot be asked: {store['error']}"
        return
    found = section(store, "capabilities")
    if not store.get("probed"):
        yield "its capabilities are not known yet: the first writable mount probes it"
        return
    able = [name for name, value in found.items() if value is True]
    unable = [name for name, value in found.items() if value is False]
    yield f"can: {', '.join(able)}"
    yield f"cannot: {', '.join(unable) or 'nothing that is used'}"
    notes = found.get("notes")
    yield from (str(note) for note in (notes if isinstance(notes, list) else ()))
    unknown = store.get("needs_newer_program")
    if isinstance(unknown, list) and unknown:
        names = ", ".join(map(str, unknown))
        yield f"the mount is read-only, as the lake has {names}: install a newer version to write"


def _lines_of_kernel(kernel: Mapping[str, object]) -> Iterator[str]:
    yield f"Linux {kernel['release']}, libfuse {kernel.get('libfuse') or 'of unknown version'}"
    requested = kernel.get("requested")
    names = [str(name) for name in requested] if isinstance(requested, list) else []
    if kernel.get("writeback_cache"):
        names.append("writeback_cache")
    yield f"requested: {', '.join(names) or 'nothing'}; {kernel.get('max_background')} requests in the background"
    missing = kernel.get("missing")
    yield from (str(each) for each in (missing if isinstance(missing, list) else ()))


# -- what others on the network, or another user of this machine, could read or change


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
