"""Options that several commands share: how a store is reached, which lake a URL lies in, ``--json``, ``--dry-run``.

Credentials are never among them: boto3 finds them, in the environment of the process that asks the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypedDict, TypeVar
from urllib.parse import urlsplit

import click
from msgspec import structs

from lakefs_fuse.cli.help import option
from lakefs_fuse.cli.parameters import DURATION, default_text
from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.errors import ConfigError

_DEFAULTS: dict[str, object] = {field.name: field.default for field in structs.fields(StoreConfig)}
GROUP = "Source options"

SOURCE_HELP = "The lake: s3://bucket/prefix, file:///absolute/dir, or a mountpoint."
PATH_HELP = (
    "A path in a mount, or the URL of a file or directory in a lake: s3://bucket/prefix/dir or file:///lake/dir."
)

Decorated = TypeVar("Decorated", bound=Callable[..., object])


def _default(name: str) -> str:
    return default_text(name, _DEFAULTS[name])


class StoreOptions(TypedDict):
    """Values as click passes them; None where the default of config.py applies."""

    endpoint_url: str | None
    region: str | None
    profile: str | None
    addressing_style: str | None
    ca_bundle: str | None
    requests: int | None
    retry_timeout: float | None


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
        help="Region of the bucket. Set it where boto3's configuration names none, or another.  "
        "[default: that of boto3]",
    ),
    option(
        "--profile",
        metavar="NAME",
        group=GROUP,
        help="Profile in ~/.aws that credentials and settings come from.  [default: that of boto3]",
    ),
    option(
        "--addressing-style",
        type=click.Choice(["auto", "path", "virtual"]),
        group=GROUP,
        help="Whether requests name the bucket in the path or in the host name (virtual); auto leaves it to botocore. "
        f"Use path for a store without DNS names for buckets.  {_default('addressing_style')}",
    ),
    option(
        "--ca-bundle",
        type=click.Path(),
        metavar="FILE",
        group=GROUP,
        help="PEM file of trusted certificate authorities. Set it for a store with a private certificate.  "
        "[default: that of boto3]",
    ),
    option(
        "--requests",
        type=click.IntRange(1, 1024),
        metavar="N",
        group=GROUP,
        help="Maximum number of concurrent store requests, besides uploads of parts. Raise it for a distant store, "
        f"lower it for one that throttles.  {_default('requests_max')}",
    ),
    option(
        "--retry-timeout",
        type=DURATION,
        group=GROUP,
        help="Maximum time for which a failing request is retried before its error is returned. Raise it to survive "
        f"longer outages.  {_default('retry_timeout_s')}",
    ),
)

lake_option = option(
    "--lake",
    metavar="SOURCE",
    group=GROUP,
    help="SOURCE of the lake as it is mounted. Set it where PATH is a URL below several lakes.  "
    "[default: the nearest directory at or above PATH that has commits, else PATH itself]",
)
json_option = option("--json", "as_json", is_flag=True, help="Print JSON with stable names, for scripts.")
dry_run_option = option("--dry-run", is_flag=True, help="Print what would be done, and change nothing.")


def store_options(command: Decorated) -> Decorated:
    """Add the options that say how a store is reached; the function takes them as `StoreOptions`."""
    for each in reversed(_OPTIONS):
        command = each(command)
    return command


def build_store(source: Source, options: StoreOptions) -> StoreConfig:
    """The store of ``source``, with absolute paths, because daemons work in another directory. Raises ConfigError."""
    endpoint_url = _checked_endpoint(options["endpoint_url"])
    ca_bundle = options["ca_bundle"]
    if ca_bundle is not None and not os.access(ca_bundle, os.R_OK):
        raise ConfigError(f"--ca-bundle {ca_bundle} cannot be read: name a PEM file that you may read")
    return structs.replace(
        StoreConfig(source=source),
        **given(
            endpoint_url=endpoint_url,
            region=options["region"],
            profile=options["profile"],
            addressing_style=options["addressing_style"],
            ca_bundle=absolute(ca_bundle),
            retry_timeout_s=options["retry_timeout"],
            requests_max=options["requests"],
        ),
    )


def any_given(options: Mapping[str, object]) -> str:
    """The first store option on the command line, as it is typed; empty if there is none."""
    for name in StoreOptions.__annotations__:
        if options.get(name) is not None:
            return "--" + name.replace("_", "-")
    return ""


def given(**values: object) -> dict[str, object]:
    """The values that are not None, so that defaults stay in config.py alone."""
    return {name: value for name, value in values.items() if value is not None}


def absolute(path: str | None) -> str | None:
    """``path`` with ~ and the working directory resolved."""
    return None if path is None else os.path.abspath(os.path.expanduser(path))


def _checked_endpoint(url: str | None) -> str | None:
    if url is None:
        return None
    parts = urlsplit(url)
    if "@" in parts.netloc:
        # Not repeated in the message: it may be a secret.
        raise ConfigError("--endpoint-url must not hold credentials: put them in the environment or ~/.aws")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"--endpoint-url {url}: expected for example https://s3.example.com or http://localhost:8333")
    return url.rstrip("/")
