"""`lakefs-fuse mount`: from arguments to a checked `MountConfig`, and a daemon that serves it."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TypedDict, Unpack
from urllib.parse import urlsplit

import click
import platformdirs
from msgspec import structs

from lakefs_fuse.cli import preflight, spawn
from lakefs_fuse.cli.mount_options import expand
from lakefs_fuse.cli.parameters import DURATION, OCTAL_MODE, SIZE
from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.control.runtime import real_mountpoint
from lakefs_fuse.errors import ConfigError

APP = "lakefs-fuse"

_DEFAULTS: dict[str, object] = {
    field.name: field.default for kind in (StoreConfig, MountConfig) for field in structs.fields(kind)
}


def _default(name: str) -> str:
    """What config.py says, for the help text: sizes in the largest unit, modes in octal."""
    value = _DEFAULTS[name]
    if name.endswith("_mode"):
        return f"[default: {value:o}]"
    if "bytes" in name and isinstance(value, int):
        unit, bits = next((unit, bits) for unit, bits in _SIZE_UNITS if value % (1 << bits) == 0)
        return f"[default: {value >> bits}{unit}]"
    return f"[default: {value:g}]" if isinstance(value, float) else f"[default: {value}]"


_SIZE_UNITS = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10), ("", 0))


class Options(TypedDict):
    """The options of `mount` as click hands them over; None where config.py's default holds."""

    cache_dir: str | None
    cache_size: int | None
    staging_size: int | None
    free_space: int | None
    endpoint_url: str | None
    region: str | None
    profile: str | None
    addressing_style: str | None
    ca_bundle: str | None
    metadata_ttl: float | None
    read_only: bool
    allow_other: bool
    uid: int | None
    gid: int | None
    file_mode: int | None
    dir_mode: int | None
    uploads: int | None
    requests: int | None
    retry_timeout: float | None
    attributes: str | None
    orphans: str | None
    log_file: str | None
    log_level: str | None
    foreground: bool


class MountCommand(click.Command):
    """A command that takes its long options in ``-o`` too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags: dict[str, bool] = {}
        for param in self.params:
            if isinstance(param, click.Option) and param.name != "mount_o":
                for name in (*param.opts, *param.secondary_opts):
                    flags[name.removeprefix("--")] = param.is_flag
        return super().parse_args(ctx, expand(args, flags))


@click.command("mount", cls=MountCommand, context_settings={"show_default": True})
@click.argument("source")
@click.argument("mountpoint", type=click.Path())
@click.option("-o", "mount_o", metavar="K=V,…", expose_value=False, help="Options as mount(8) passes them: ro, "
              "allow_other, and every long option here, with - or _.")  # fmt: skip
@click.option("--cache-dir", type=click.Path(), help="Local directory, best on NVMe, one mount each.  "
              "[default: one per source in the user's cache directory]")  # fmt: skip
@click.option("--cache-size", type=SIZE, help=f"Most that cached blocks may take.  {_default('cache_bytes_max')}")
@click.option(
    "--staging-size", type=SIZE, help=f"Most that bytes not yet in the store may take.  {_default('staging_bytes_max')}"
)
@click.option(
    "--free-space", type=SIZE, help=f"Disk space that cache and staging leave free.  {_default('free_bytes_min')}"
)
@click.option("--endpoint-url", metavar="URL", help="S3 endpoint, where it is not AWS.")
@click.option("--region", help="As boto3 takes it; else from its own configuration.")
@click.option("--profile", help="Profile of ~/.aws to take credentials and settings from.")
@click.option("--addressing-style", type=click.Choice(["auto", "path", "virtual"]), help=_default("addressing_style"))
@click.option("--ca-bundle", type=click.Path(), help="PEM file of certificate authorities to trust.")
@click.option("--metadata-ttl", type=DURATION, help=f"How long a listing is believed.  {_default('metadata_ttl_s')}")
@click.option("--read-only/--read-write", help="Refuse every change.")
@click.option("--allow-other", is_flag=True, help="Let other users in.")
@click.option("--uid", type=click.IntRange(0, 2**32 - 2), help="Owner of files that name none.  [default: you]")
@click.option("--gid", type=click.IntRange(0, 2**32 - 2), help="Group of files that name none.  [default: yours]")
@click.option("--file-mode", type=OCTAL_MODE, help=f"Mode of files that name none.  {_default('file_mode')}")
@click.option("--dir-mode", type=OCTAL_MODE, help=f"Mode of directories that name none.  {_default('dir_mode')}")
@click.option("--uploads", type=click.IntRange(1, 64), help=f"Parts uploaded at once.  {_default('uploads_max')}")
@click.option(
    "--requests", type=click.IntRange(1, 1024), help=f"Other store requests at once.  {_default('requests_max')}"
)
@click.option(
    "--retry-timeout", type=DURATION, help=f"How long a failing request is tried again.  {_default('retry_timeout_s')}"
)
@click.option("--attributes", type=click.Choice(["listing", "objects"]), help="Where mode, owner and mtime of objects "
              f"come from: the listing, or one HEAD each, once.  {_default('attributes')}")  # fmt: skip
@click.option("--orphans", type=click.Choice(["keep", "finish", "abort"]), help="What to do with files that a dead "
              f"daemon left unfinished.  {_default('orphans')}")  # fmt: skip
@click.option("--log-file", type=click.Path(), help="[default: one per mountpoint in the user's state directory]")
@click.option("--log-level", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
              help=_default("log_level"))  # fmt: skip
@click.option("--foreground", is_flag=True, help="Stay in the foreground and log to standard error.")
def mount(source: str, mountpoint: str, **options: Unpack[Options]) -> None:
    """Mount SOURCE (s3://bucket/prefix or file:///dir) at the directory MOUNTPOINT.

    Returns when the mount answers. Credentials come from where boto3 finds them: AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY, ~/.aws, or the machine's role; they are never arguments.
    """
    config = build_config(source, mountpoint, options)
    preflight.check(config, preflight.Host.this())
    if config.foreground:
        spawn.run_in_foreground(config)
    else:
        spawn.start(config)


def build_config(source: str, mountpoint: str, options: Options) -> MountConfig:
    """Raises ConfigError. Paths come out absolute, because the daemon works elsewhere."""
    parsed = Source.parse(source)
    endpoint_url = _checked_endpoint(options["endpoint_url"])
    ca_bundle = options["ca_bundle"]
    if ca_bundle is not None and not os.access(ca_bundle, os.R_OK):
        raise ConfigError(f"--ca-bundle {ca_bundle} cannot be read")
    store = structs.replace(
        StoreConfig(source=parsed),
        **_given(
            endpoint_url=endpoint_url,
            region=options["region"],
            profile=options["profile"],
            addressing_style=options["addressing_style"],
            ca_bundle=_absolute(ca_bundle),
            retry_timeout_s=options["retry_timeout"],
            requests_max=options["requests"],
        ),
    )
    point = real_mountpoint(mountpoint)
    foreground = options["foreground"]
    config = MountConfig(
        store=store,
        mountpoint=point,
        cache_dir=_absolute(options["cache_dir"]) or default_cache_dir(store),
        log_file=_absolute(options["log_file"]) or (None if foreground else default_log_file(point)),
        read_only=options["read_only"],
        allow_other=options["allow_other"],
        foreground=foreground,
    )
    return structs.replace(
        config,
        **_given(
            cache_bytes_max=options["cache_size"],
            staging_bytes_max=options["staging_size"],
            free_bytes_min=options["free_space"],
            metadata_ttl_s=options["metadata_ttl"],
            uid=options["uid"],
            gid=options["gid"],
            file_mode=options["file_mode"],
            dir_mode=options["dir_mode"],
            uploads_max=options["uploads"],
            log_level=options["log_level"],
            attributes=options["attributes"],
            orphans=options["orphans"],
        ),
    )


def _given(**values: object) -> dict[str, object]:
    """Those that were given, so that defaults stay in config.py alone."""
    return {name: value for name, value in values.items() if value is not None}


def _absolute(path: str | None) -> str | None:
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


def default_cache_dir(store: StoreConfig) -> str:
    """One directory per lake: a source, and which store is meant by it."""
    endpoint = store.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    profile = store.profile or os.environ.get("AWS_PROFILE") or ""
    identity = "\n".join((str(store.source), endpoint, profile)) if store.source.scheme == "s3" else str(store.source)
    return str(Path(platformdirs.user_cache_dir(APP)) / hashlib.sha256(identity.encode()).hexdigest()[:16])


def default_log_file(mountpoint: str) -> str:
    """One file per mountpoint, with a name that tells which."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", mountpoint).strip("-")[-60:] or "root"
    digest = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:8]
    return str(Path(platformdirs.user_state_dir(APP)) / "log" / f"{readable}-{digest}.log")
