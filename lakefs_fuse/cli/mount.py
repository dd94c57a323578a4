"""`lakefs-fuse mount`: from arguments to a checked `MountConfig`, and a daemon that serves it."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack, cast

import click
import platformdirs
from msgspec import structs

from lakefs_fuse.cli import preflight, spawn, systemd
from lakefs_fuse.cli.mount_options import expand
from lakefs_fuse.cli.parameters import DURATION, OCTAL_MODE, RATE, SIZE, default_text
from lakefs_fuse.cli.predecessor import wait_for_predecessor
from lakefs_fuse.cli.store_options import StoreOptions, absolute, build_store, given, store_options
from lakefs_fuse.cli.worker import find_place, place_below
from lakefs_fuse.config import DURABILITIES, PACK_MODES, REFRESH_S_MIN, MountConfig, Source, StoreConfig
from lakefs_fuse.control.runtime import real_mountpoint
from lakefs_fuse.errors import ConfigError
from lakefs_fuse.path_rules import check_pack_threshold, read_rules

APP = "lakefs-fuse"

_DEFAULTS: dict[str, object] = {field.name: field.default for field in structs.fields(MountConfig)}


def _default(name: str) -> str:
    return default_text(name, _DEFAULTS[name])


class Options(StoreOptions):
    """The options of `mount` as click hands them over; None where config.py's default holds."""

    cache_dir: str | None
    cache_size: int | None
    staging_size: int | None
    free_space: int | None
    metadata_ttl: float | None
    refresh: float | None
    read_only: bool
    immutable: bool
    snapshot: str | None
    allow_other: bool
    uid: int | None
    gid: int | None
    file_mode: int | None
    dir_mode: int | None
    uploads: int | None
    pack: str | None
    pack_threshold: int | None
    rules: str | None
    relocate_after: float | None
    durability: str | None
    writeback_delay: float | None
    staging_timeout: float | None
    upload_limit: int | None
    supervise: bool
    attributes: str | None
    orphans: str | None
    log_file: str | None
    log_level: str | None
    foreground: bool
    print_systemd_unit: bool


class MountCommand(click.Command):
    """A command that takes its long options in ``-o`` too."""

    def flags(self) -> dict[str, bool]:
        """Long options without their dashes, and whether they take no value."""
        return {
            name.removeprefix("--"): param.is_flag
            for param in self.params
            if isinstance(param, click.Option) and param.name != "mount_o"
            for name in (*param.opts, *param.secondary_opts)
        }

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, expand(args, self.flags()))


@click.command("mount", cls=MountCommand, context_settings={"show_default": True})
@click.argument("source")
@click.argument("mountpoint", type=click.Path(), required=False)
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
@store_options
@click.option("--metadata-ttl", type=DURATION, help=f"How long a listing is believed.  {_default('metadata_ttl_s')}")
@click.option(
    "--refresh", type=DURATION, help=f"How often the store is asked for commits of others.  {_default('refresh_s')}"
)
@click.option("--read-only/--read-write", help="Refuse every change.")
@click.option("--immutable", is_flag=True, help="Show SOURCE as it is now, and nothing that comes later: "
              "read-only, and the kernel remembers everything. `lakefs-fuse refresh` moves it on.")  # fmt: skip
@click.option("--snapshot", metavar="NAME", help="With --immutable: as the snapshot has it that `lakefs-fuse snapshot "
              "--name` made.")  # fmt: skip
@click.option("--allow-other", is_flag=True, help="Let other users in.")
@click.option("--uid", type=click.IntRange(0, 2**32 - 2), help="Owner of files that name none.  [default: you]")
@click.option("--gid", type=click.IntRange(0, 2**32 - 2), help="Group of files that name none.  [default: yours]")
@click.option("--file-mode", type=OCTAL_MODE, help=f"Mode of files that name none.  {_default('file_mode')}")
@click.option("--dir-mode", type=OCTAL_MODE, help=f"Mode of directories that name none.  {_default('dir_mode')}")
@click.option("--uploads", type=click.IntRange(1, 64), help=f"Parts uploaded at once.  {_default('uploads_max')}")
@click.option("--pack", type=click.Choice(PACK_MODES), help="Whether small files share packs: where several close "
              f"together, all, or none.  {_default('pack')}")  # fmt: skip
@click.option(
    "--pack-threshold", type=SIZE, help=f"Largest file that goes into a pack.  {_default('pack_threshold_bytes')}"
)
@click.option("--rules", type=click.Path(), metavar="FILE", help="TOML file of settings that differ by path.")
@click.option("--relocate-after", type=DURATION, help="Plain objects that were renamed are copied to their new key by "
              f"the store after so long; 0 leaves them.  {_default('relocate_after_s')}")  # fmt: skip
@click.option("--durability", type=click.Choice(DURABILITIES), help="What close() waits for: the store, or (writeback) "
              f"the local disk, to upload later.  {_default('durability')}")  # fmt: skip
@click.option("--writeback-delay", type=DURATION, help="How long files accepted by write-back wait for others to share "
              f"a pack with.  {_default('writeback_delay_s')}")  # fmt: skip
@click.option("--staging-timeout", type=DURATION, help="How long a writer waits while staging is full before it gets "
              f"ENOSPC.  {_default('staging_timeout_s')}")  # fmt: skip
@click.option("--upload-limit", type=RATE, help="Most that uploads send in a second, such as 2GiB/s; 0 is no limit.  "
              f"{_default('upload_bytes_s_max')}")  # fmt: skip
@click.option("--supervise/--no-supervise", default=True, help="Start a daemon that died again, and mount anew.")
@click.option("--attributes", type=click.Choice(["listing", "objects"]), help="Where mode, owner and mtime of objects "
              f"come from: the listing, or one HEAD each, once.  {_default('attributes')}")  # fmt: skip
@click.option("--orphans", type=click.Choice(["keep", "finish", "abort"]), help="What to do with files that a dead "
              f"daemon left unfinished.  {_default('orphans')}")  # fmt: skip
@click.option("--log-file", type=click.Path(), help="[default: one per mountpoint in the user's state directory]")
@click.option("--log-level", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
              help=_default("log_level"))  # fmt: skip
@click.option("--foreground", is_flag=True, help="Stay in the foreground and log to standard error.")
@click.option("--print-systemd-unit", is_flag=True, help="Mount nothing; print a systemd service that would.")
def mount(source: str, mountpoint: str | None, **options: Unpack[Options]) -> None:
    """Mount SOURCE (s3://bucket/prefix or file:///dir) at the directory MOUNTPOINT.

    With --immutable SOURCE may also be a directory in a mount that is there; without MOUNTPOINT it is covered by its
    own state of now.

    Returns when the mount answers. Waits first for the daemon of a mount that was there before, while that stores what
    is left. Credentials come from where boto3 finds them: AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY, ~/.aws, or the machine's role; they are never arguments.
    """
    config = build_config(source, mountpoint, options)
    if config.immutable:
        config = structs.replace(config, mounting=uuid.uuid4().hex)
    if options["print_systemd_unit"]:
        context = click.get_current_context()
        click.echo(systemd.unit(config, context, uid=os.geteuid(), program=systemd.this_program()), nl=False)
        return
    for note in preflight.check(config, preflight.Host.this()):
        click.echo(f"lakefs-fuse: {note}", err=True)
    wait_for_predecessor(config)
    if config.foreground:
        spawn.run_in_foreground(config)
    else:
        spawn.start(config)


def config_of(args: Sequence[str]) -> MountConfig:
    """What a command line asks for, checked and not mounted. Raises ConfigError and click.UsageError."""
    context = mount.make_context("mount", list(args))
    source, mountpoint = str(context.params.pop("source")), context.params.pop("mountpoint")
    return build_config(source, mountpoint, cast("Options", context.params))


def build_config(source: str, mountpoint: str | None, options: Options) -> MountConfig:
    """Raises ConfigError, and LakeError where SOURCE is a path that is not in a mount. Paths come out absolute, because
    the daemon works elsewhere."""
    if options["immutable"]:
        _check_immutable(options)
    elif options["snapshot"] is not None:
        raise ConfigError("--snapshot goes with --immutable: what a snapshot has cannot be written to")
    within = options["immutable"] and "://" not in source
    store = store_within(source, options) if within else build_store(Source.parse(source), options)
    if mountpoint is None:
        if not within:
            raise ConfigError("MOUNTPOINT is missing: the directory at which the lake is to be seen")
        mountpoint = source
    _check_packing(options)
    point = real_mountpoint(mountpoint)
    foreground = options["foreground"]
    config = MountConfig(
        store=store,
        mountpoint=point,
        cache_dir=absolute(options["cache_dir"]) or default_cache_dir(store, state_of(options)),
        log_file=absolute(options["log_file"]) or (None if foreground else default_log_file(point)),
        read_only=options["read_only"] or options["immutable"],
        immutable=options["immutable"],
        allow_other=options["allow_other"],
        foreground=foreground,
        supervise=options["supervise"],
    )
    return structs.replace(
        config,
        **given(
            cache_bytes_max=options["cache_size"],
            staging_bytes_max=options["staging_size"],
            free_bytes_min=options["free_space"],
            metadata_ttl_s=options["metadata_ttl"],
            refresh_s=options["refresh"],
            snapshot=options["snapshot"],
            uid=options["uid"],
            gid=options["gid"],
            file_mode=options["file_mode"],
            dir_mode=options["dir_mode"],
            uploads_max=options["uploads"],
            pack=options["pack"],
            pack_threshold_bytes=options["pack_threshold"],
            rules=None if options["rules"] is None else read_rules(os.path.expanduser(options["rules"])),
            relocate_after_s=options["relocate_after"],
            durability=options["durability"],
            writeback_delay_s=options["writeback_delay"],
            staging_timeout_s=options["staging_timeout"],
            upload_bytes_s_max=options["upload_limit"],
            log_level=options["log_level"],
            attributes=options["attributes"],
            orphans=options["orphans"],
        ),
    )


_OF_WRITING = (
    "staging_size", "uploads", "pack", "pack_threshold", "rules", "relocate_after", "durability", "writeback_delay",
    "staging_timeout", "upload_limit", "orphans",
)  # fmt: skip
_OF_CHANGES = ("metadata_ttl", "refresh")


def _check_immutable(options: Options) -> None:
    """Raises ConfigError for what an immutable mount has no use for."""
    given_options = cast("dict[str, object]", options)
    for names, why in ((_OF_WRITING, "writes nothing"), (_OF_CHANGES, "looks for no changes but at `refresh`")):
        for name in names:
            if given_options[name] is not None:
                raise ConfigError(f"--{name.replace('_', '-')}: an --immutable mount {why}: leave one of the two out")


def store_within(path: str, options: Options) -> StoreConfig:
    """The place in a store that a directory of a mount shows. Raises LakeError."""
    place = find_place(path, options)
    return place_below(place.store, place.path)


def _check_packing(options: Options) -> None:
    """Raises ConfigError."""
    if options["pack_threshold"] is not None:
        check_pack_threshold(options["pack_threshold"], "--pack-threshold")
    if options["refresh"] is not None and options["refresh"] < REFRESH_S_MIN:
        raise ConfigError(f"--refresh {options['refresh']:g}: expected {REFRESH_S_MIN:g} s or more")


def state_of(options: Options) -> str:
    """Which state of a lake is shown; empty where that is always the newest."""
    return f"immutable {options['snapshot'] or ''}" if options["immutable"] else ""


def default_cache_dir(store: StoreConfig, state: str = "") -> str:
    """One directory per lake: a source, and which store is meant by it; another for each state that does not change."""
    identity = "\n".join(store.meant) if store.source.scheme == "s3" else str(store.source)
    identity += f"\n{state}" if state else ""
    return str(Path(platformdirs.user_cache_dir(APP)) / hashlib.sha256(identity.encode()).hexdigest()[:16])


def default_log_file(mountpoint: str) -> str:
    """One file per mountpoint, with a name that tells which."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", mountpoint).strip("-")[-60:] or "root"
    digest = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:8]
    return str(Path(platformdirs.user_state_dir(APP)) / "log" / f"{readable}-{digest}.log")
