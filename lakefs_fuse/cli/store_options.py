"""Options that several commands share: how to reach a store, the lake that contains a URL, ``--json``, ``--dry-run``.

Credentials are never among them: boto3 finds them, in the environment of the process that asks the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import structs

from lakefs_fuse.cli.help import option
from lakefs_fuse.cli.parameters import DURATION, LocalPath, Number, default_text
from lakefs_fuse.config import Source, StoreConfig, parse_sse, parse_storage_class
from lakefs_fuse.errors import ConfigError

GROUP = "Source options"

SOURCE_HELP = "The lake: s3://bucket/prefix, file:///absolute/dir, or a mountpoint."
PATH_HELP = (
    "A path in a mount, or the URL of a file or directory in a lake: s3://bucket/prefix/dir or file:///lake/dir."
)

Decorated = TypeVar("Decorated", bound=Callable[..., object])
Options = Mapping[str, Any]
"""Values of options by the names of their fields in config.py; None where the default applies."""
FLAGS = {
    "endpoint_url": "--endpoint-url",
    "region": "--region",
    "profile": "--profile",
    "addressing_style": "--addressing-style",
    "ca_bundle": "--ca-bundle",
    "requests_max": "--requests",
    "retry_timeout_s": "--retry-timeout",
    "unsigned": "--unsigned",
    "requester_pays": "--requester-pays",
    "sse": "--sse",
    "storage_class": "--storage-class",
}
"""Options about access to the store, by their fields of `StoreConfig`."""
_OF_S3 = ("unsigned", "requester_pays", "sse", "storage_class")
"""Options that have no effect on a directory, which therefore refuses them."""


def setting(
    kind: type[msgspec.Struct], flag: str, field: str, *, help: str, **attributes: Any
) -> Callable[[Decorated], Decorated]:
    """An option for a field of ``kind``, whose default ends its help."""
    default = next(each.default for each in structs.fields(kind) if each.name == field)
    return option(flag, field, help=f"{help}  {default_text(field, default)}", **attributes)


_OPTIONS = (
    option(
        "--endpoint-url",
        metavar="URL",
        group=GROUP,
        help="S3 endpoint. Set it for a store other than AWS, such as http://localhost:8333.  [default: that of boto3]",
    ),
    option(
        "--region",
        metavar="NAME",
        group=GROUP,
        help="Region of the bucket. Set it if boto3's configuration names none, or another one.  [default: that of "
        "boto3]",
    ),
    option(
        "--profile",
        metavar="NAME",
        group=GROUP,
        help="Profile in ~/.aws that credentials and settings come from.  [default: that of boto3]",
    ),
    setting(
        StoreConfig,
        "--addressing-style",
        "addressing_style",
        type=click.Choice(["auto", "path", "virtual"]),
        group=GROUP,
        help="Whether requests name the bucket in the path or in the host name (virtual); auto leaves it to botocore. "
        "Use path for a store without DNS names for buckets.",
    ),
    option(
        "--ca-bundle",
        type=LocalPath(),
        metavar="FILE",
        group=GROUP,
        help="PEM file of trusted certificate authorities. Set it for a store with a private certificate.  "
        "[default: that of boto3]",
    ),
    setting(
        StoreConfig,
        "--requests",
        "requests_max",
        type=Number(1, 1024),
        metavar="N",
        group=GROUP,
        help="Maximum number of concurrent store requests, besides uploads of parts. Raise it for a distant store, "
        "lower it for one that throttles.",
    ),
    setting(
        StoreConfig,
        "--retry-timeout",
        "retry_timeout_s",
        type=DURATION,
        group=GROUP,
        help="Maximum time for which a failing request is retried before its error is returned. Raise it to survive "
        "longer outages.",
    ),
    option(
        "--unsigned",
        is_flag=True,
        default=None,
        show_default=False,
        group=GROUP,
        help="Sign no request and look up no credentials. Use it for a public bucket; a mount is read-only then, "
        "unless --read-write is given.",
    ),
    option(
        "--requester-pays",
        is_flag=True,
        default=None,
        show_default=False,
        group=GROUP,
        help="Pay for each request and each byte that is sent, instead of the bucket's owner. Use it for a bucket "
        "whose requesters pay.",
    ),
    option(
        "--sse",
        metavar="HOW",
        group=GROUP,
        help="Encryption of each stored object: s3 (the store's own key), kms (the default KMS key), or kms:KEY-ID. "
        "Set it if the bucket's default is not what you need, or its policy requires it.  [default: that of the "
        "bucket]",
    ),
    option(
        "--storage-class",
        metavar="CLASS",
        group=GROUP,
        help="Storage class of stored files, such as INTELLIGENT_TIERING. Set it for data that is kept for long and "
        "read rarely.  [default: that of the store]",
    ),
)

lake_option = option(
    "--lake",
    metavar="SOURCE",
    group=GROUP,
    help="SOURCE of the lake as it is mounted. Set it if PATH is a URL below several lakes.  [default: the nearest "
    "directory at or above PATH that has commits, or else a lake record]",
)
json_option = option("--json", "as_json", is_flag=True, help="Print JSON with stable names, for scripts.")
dry_run_option = option("--dry-run", is_flag=True, help="Print what would be done, and change nothing.")


def store_options(command: Decorated) -> Decorated:
    """Add the options about access to the store; the function takes them as `Options`."""
    for each in reversed(_OPTIONS):
        command = each(command)
    return command


def build_store(source: Source, options: Options) -> StoreConfig:
    """The store of ``source``, with absolute paths, because daemons work in another directory. Raises ConfigError."""
    values = given(options, FLAGS)
    if source.scheme != "s3" and (named := next((FLAGS[name] for name in _OF_S3 if name in values), "")):
        raise ConfigError(f"{named}: {source} is not an S3 store: leave the option out")
    if values.get("unsigned") and values.get("requester_pays"):
        raise ConfigError(
            "--unsigned and --requester-pays exclude each other: the account that pays must sign, so omit --unsigned"
        )
    if "endpoint_url" in values:
        values["endpoint_url"] = _checked_endpoint(values["endpoint_url"])
    for name, parse in (("sse", parse_sse), ("storage_class", parse_storage_class)):
        if name in values:
            values[name] = parse(values[name])
    if "ca_bundle" in values:
        if not os.access(values["ca_bundle"], os.R_OK):
            raise ConfigError(f"--ca-bundle {values['ca_bundle']} cannot be read: name a PEM file that you may read")
        values["ca_bundle"] = absolute(values["ca_bundle"])
    return structs.replace(StoreConfig(source=source), **values)


def any_given(options: Options) -> str:
    """The first store option on the command line, as it is typed; empty if there is none."""
    return next((FLAGS[name] for name in given(options, FLAGS)), "")


def given(options: Options, names: Iterable[str]) -> dict[str, Any]:
    """The values that are not None, of these options."""
    return {name: options[name] for name in names if options.get(name) is not None}


def absolute(path: str | None) -> str | None:
    """``path`` with ~ and the working directory resolved."""
    return None if path is None else os.path.abspath(os.path.expanduser(path))


def _checked_endpoint(url: str) -> str:
    if "@" in url:
        # Not repeated in the message: it may be a secret.
        raise ConfigError("--endpoint-url must not hold credentials: put them in the environment or ~/.aws")
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port, or of an IPv6 address
        is_whole = False
    if not is_whole or parts.query or parts.fragment or not url.isprintable():
        raise ConfigError(
            f"--endpoint-url {url!r}: expected for example https://s3.example.com or http://localhost:8333"
        )
    return url.rstrip("/")
