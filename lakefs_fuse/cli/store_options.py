"""The options that say how a store is reached: the same for every command that takes a SOURCE.

Credentials are never among them; they come from where boto3 finds them, in the environment of whoever asks the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypedDict, TypeVar
from urllib.parse import urlsplit

import click
from msgspec import structs

from lakefs_fuse.cli.parameters import DURATION, default_text
from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.errors import ConfigError

_DEFAULTS: dict[str, object] = {field.name: field.default for field in structs.fields(StoreConfig)}

Decorated = TypeVar("Decorated", bound=Callable[..., object])


def _default(name: str) -> str:
    return default_text(name, _DEFAULTS[name])


class StoreOptions(TypedDict):
    """As click hands them over; None where config.py's default holds."""

    endpoint_url: str | None
    region: str | None
    profile: str | None
    addressing_style: str | None
    ca_bundle: str | None
    requests: int | None
    retry_timeout: float | None


_OPTIONS = (
    click.option("--endpoint-url", metavar="URL", help="S3 endpoint, where it is not AWS."),
    click.option("--region", help="As boto3 takes it; else from its own configuration."),
    click.option("--profile", help="Profile of ~/.aws to take credentials and settings from."),
    click.option(
        "--addressing-style", type=click.Choice(["auto", "path", "virtual"]), help=_default("addressing_style")
    ),
    click.option("--ca-bundle", type=click.Path(), help="PEM file of certificate authorities to trust."),
    click.option(
        "--requests", type=click.IntRange(1, 1024), help=f"Other store requests at once.  {_default('requests_max')}"
    ),
    click.option(
        "--retry-timeout",
        type=DURATION,
        help=f"How long a failing request is tried again.  {_default('retry_timeout_s')}",
    ),
)


def store_options(command: Decorated) -> Decorated:
    """Adds them to a command, whose function takes them as `StoreOptions`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def build_store(source: Source, options: StoreOptions) -> StoreConfig:
    """Raises ConfigError. Paths come out absolute, because whoever asks the store works elsewhere."""
    endpoint_url = _checked_endpoint(options["endpoint_url"])
    ca_bundle = options["ca_bundle"]
    if ca_bundle is not None and not os.access(ca_bundle, os.R_OK):
        raise ConfigError(f"--ca-bundle {ca_bundle} cannot be read")
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
    """The first store option that was given, as it is typed; empty if none."""
    for name in StoreOptions.__annotations__:
        if options.get(name) is not None:
            return "--" + name.replace("_", "-")
    return ""


def given(**values: object) -> dict[str, object]:
    """Those that were given, so that defaults stay in config.py alone."""
    return {name: value for name, value in values.items() if value is not None}


def absolute(path: str | None) -> str | None:
    """With ~ and the working directory put in."""
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
