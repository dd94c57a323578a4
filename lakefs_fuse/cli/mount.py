"""`lakefs-fuse mount`: makes a checked `MountConfig` of its arguments, and starts a daemon that serves it."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
import platformdirs
from msgspec import structs

from lakefs_fuse.cli import preflight, spawn, systemd
from lakefs_fuse.cli.daemons import open_daemon
from lakefs_fuse.cli.explain import explain
from lakefs_fuse.cli.help import SETTINGS, GroupedCommand, argument, option
from lakefs_fuse.cli.mount_health import NAMES_MISSING, why_read_only
from lakefs_fuse.cli.mount_options import OF_WRITERS, WORKLOADS, describe_sets, expand, settings_of
from lakefs_fuse.cli.parameters import DURATION, FOREIGN, OCTAL_MODE, RATE, SIZE, LocalPath, Number, format_bytes
from lakefs_fuse.cli.predecessor import wait_for_predecessor
from lakefs_fuse.cli.stats_values import number, section
from lakefs_fuse.cli.store_options import GROUP as SOURCE_GROUP
from lakefs_fuse.cli.store_options import Options, absolute, build_store, given, setting, store_options
from lakefs_fuse.cli.worker import find_place, place_below
from lakefs_fuse.config import (
    CACHE_BYTES_MIN,
    DURABILITIES,
    HARD_LINKS,
    MAINTENANCE,
    MEMORY_BYTES_MIN,
    MIB,
    PACK_MODES,
    REFRESH_S_MIN,
    STAGING_BYTES_MIN,
    DatasetName,
    MountConfig,
    Source,
    StoreConfig,
    parse_cluster_cache,
)
from lakefs_fuse.control.runtime import real_mountpoint
from lakefs_fuse.errors import ConfigError, LakeError
from lakefs_fuse.path_rules import check_pack_threshold, check_publish, read_rules
from lakefs_fuse.product import PROGRAM

_setting = partial(setting, MountConfig)


class MountCommand(GroupedCommand):
    """A command that takes its long options in ``-o``, too."""

    def flags(self) -> dict[str, bool]:
        """Long options without their dashes, and whether they take no value."""
        return {
            name.removeprefix("--"): param.is_flag
            for param in self.params
            if isinstance(param, click.Option) and param.name != "mount_o"
            for name in (*param.opts, *param.secondary_opts)
        }

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, expand(args, self.flags()))
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # whose help has the options
            raise


CACHE, DURABILITY = "Cache options", "Durability options"
SHARING, DIAGNOSTICS = "Sharing options", "Diagnostics options"


@click.command("mount", cls=MountCommand, context_settings=SETTINGS)
@argument("source", help="The lake: s3://bucket/prefix or file:///absolute/dir. With --immutable also a directory "
          "in a mount.")  # fmt: skip
@argument("mountpoint", type=LocalPath(readable=False), required=False, help="The directory to mount at. With "
          "--immutable it may be omitted if SOURCE is a directory, which the mount then covers.")  # fmt: skip
@option("-o", "mount_o", metavar="K=V,…", expose_value=False, help="Options as mount(8) passes them: ro, allow_other, "
        "and every long option here, with - or _.")  # fmt: skip
@option("--profile-for", "workload", type=click.Choice(list(WORKLOADS)), metavar="WORK", help="Options for a kind of "
        f"work. Explicit options override them; --explain shows the result. {describe_sets()}.  [default: "
        "none]")  # fmt: skip
@store_options
@option("--read-only/--read-write", default=None, show_default="--read-write", group=SOURCE_GROUP, help="Refuse every "
        "change in the mount. Use it with read-only credentials. Commands such as gc, pack and snapshot use the "
        "credentials of the shell, and can also change the lake of a read-only mount.")  # fmt: skip
@option("--immutable", is_flag=True, group=SOURCE_GROUP, help="Show SOURCE as it is at mount time, read-only, and let "
        "the kernel cache all of it. Use it for a dataset that does not change while a job runs; `lakefs-fuse "
        "refresh` moves the mount to a newer state.")  # fmt: skip
@option("--snapshot", metavar="NAME", group=SOURCE_GROUP, help="With --immutable: show the state that `lakefs-fuse "
        "snapshot --name NAME` kept.  [default: the state at mount time]")  # fmt: skip
@option("--dataset", metavar="NAME@VERSION", group=SOURCE_GROUP, help="Show only this version of a dataset of the lake "
        "SOURCE (see `lakefs-fuse dataset create`); implies --immutable. The mount records in the store how much of it "
        "is on this node, for `dataset status`, unless --read-only is given, too.")  # fmt: skip
@_setting("--attributes", "attributes", type=click.Choice(["listing", "objects"]), group=SOURCE_GROUP,
        help="Origin of mode, owner and mtime of an object that was not opened here yet: the listing (--uid, "
        "--file-mode, LastModified) or the object (one HEAD request, once). Use objects where they matter before the "
        "first open.")  # fmt: skip
@option("--cache-dir", type=LocalPath(), metavar="DIR", group=CACHE, help="Local directory of cached blocks, "
        "metadata and bytes not yet in the store; one mount each. Choose a fast disk, such as NVMe.  [default: one "
        "per source in the user's cache directory]")  # fmt: skip
@_setting("--cache-size", "cache_bytes_max", type=SIZE, group=CACHE, help="Maximum size of the block cache. Set it to "
        "the size of the data that is read repeatedly.")  # fmt: skip
@_setting("--free-space", "free_bytes_min", type=SIZE, group=CACHE, help="Disk space that cache and staging leave "
        "free. Raise it on a disk that other programs fill.")  # fmt: skip
@option("--cluster-cache", metavar="URL[,URL…]", group=CACHE, help="Caching proxies that the nodes of a cluster share, "
        "such as nginx with deploy/nginx: the mount asks them for blocks before the store, which then sends each block "
        "once. Give all nodes the same list; in -o, ; separates the URLs. LAKEFS_CLUSTER_CACHE_TOKEN has their "
        "password.  [default: none]")  # fmt: skip
@option("--trust-cluster-cache", is_flag=True, group=CACHE, help="Use responses of a proxy of --cluster-cache even if "
        "no checksum of the store verifies them. Use it if only you can change the contents of the "
        "proxies.")  # fmt: skip
@_setting("--metadata-ttl", "metadata_ttl_s", type=DURATION, group=CACHE, help="Time after which a cached listing is "
        "fetched again, unless --foreign says otherwise, and for which the kernel caches names. Changes of other "
        "mounts arrive within --refresh.")  # fmt: skip
@_setting("--durability", "durability", type=click.Choice(DURABILITIES), group=DURABILITY, help="What close() waits "
        "for: the store (close), or the local disk, with uploads in the background (writeback). Use writeback to keep "
        "uploads out of the training step.")  # fmt: skip
@_setting("--writeback-delay", "writeback_delay_s", type=DURATION, group=DURABILITY, help="Time for which small files "
        "under write-back wait for others, to share a pack. Raise it for fewer, larger packs; 0 stores "
        "immediately.")  # fmt: skip
@_setting("--publish", "publish_s", type=DURATION, group=DURABILITY, help="Interval at which a file is stored while it "
        "is still being written, so that others see it grow; 0 is never. Use it, preferably in --rules, for logs and "
        "event files; each interval costs a request for each file.")  # fmt: skip
@_setting("--staging-size", "staging_bytes_max", type=SIZE, group=DURABILITY, help="Maximum size of staging, the bytes "
        "not yet in the store. Set it to the amount that is written during the longest outage to survive.")  # fmt: skip
@_setting("--staging-timeout", "staging_timeout_s", type=DURATION, group=DURABILITY, help="Maximum time for which a "
        "writer waits for space in staging before it gets ENOSPC. Lower it for jobs that should fail "
        "early.")  # fmt: skip
@_setting("--uploads", "uploads_max", type=Number(1, 64), metavar="N", group=DURABILITY,
        help="Maximum number of parts uploaded concurrently. Raise it for a fast network.")  # fmt: skip
@_setting("--upload-limit", "upload_bytes_s_max", type=RATE, group=DURABILITY, help="Maximum bytes per second of all "
        "uploads, such as 2GiB/s. Set it to leave bandwidth to other programs; 0 is no limit.")  # fmt: skip
@_setting("--download-limit", "download_bytes_s_max", type=RATE, group=CACHE, help="Maximum bytes per second that "
        "reads fetch from the store, such as 500MiB/s. Set it to leave bandwidth to other programs; 0 is no "
        "limit.")  # fmt: skip
@_setting("--memory", "memory_bytes_max", type=SIZE, group=CACHE, help="Resident memory that caches and buffers of the "
        "daemon are sized for, 192MiB or more. The program itself needs 128MiB of it. Raise it for many concurrent "
        "readers of large files; lower it on small nodes.")  # fmt: skip
@_setting("--pack", "pack", type=click.Choice(PACK_MODES), group=DURABILITY, help="Which small files are stored "
        "together in packs: those closed at about the same time (auto), all, or none. Use never if other S3 tools read "
        "every file by its key.")  # fmt: skip
@_setting("--pack-threshold", "pack_threshold_bytes", type=SIZE, group=DURABILITY, help="Maximum size of a file in a "
        "pack, at most 64MiB. Raise it for datasets of larger small files.")  # fmt: skip
@option("--rules", type=LocalPath(), metavar="FILE", group=DURABILITY, help="TOML file that sets pack, pack-threshold, "
        "durability, publish, exclusive-create and keep-newest by path (docs/operations.md). Use it if paths need "
        "different settings. `stats` and `metrics` count reads by rule, on immutable mounts as well.")  # fmt: skip
@_setting("--orphans", "orphans", type=click.Choice(["keep", "finish", "abort"]), group=DURABILITY,
        help="What to do at mount with files that a dead daemon left unfinished: keep them for `lakefs-fuse orphans`, "
        "finish (store) or abort (delete) them.")  # fmt: skip
@option("--supervise/--no-supervise", default=None, show_default="--supervise", group=DURABILITY, help="Restart a "
        "daemon that dies, and mount again. Turn it off if another program restarts it.")  # fmt: skip
@_setting("--refresh", "refresh_s", type=DURATION, group=SHARING, help="Interval at which the store is polled for "
        "commits of other mounts, at least 0.1s. Lower it to see them sooner; each poll is one LIST request. A mount "
        "that had no request for 10m polls once a minute, and before it answers the next request.")  # fmt: skip
@_setting("--hints", "hints", metavar="URL", group=SHARING, help="Redis server over which mounts notify each other of "
        "commits, redis://HOST[:PORT][/DB] or rediss://, so that changes are seen within a second; polls then only "
        "find commits without a hint. Give it to all mounts of a lake. The password comes from LAKEFS_HINTS_PASSWORD, "
        "or from the file LAKEFS_HINTS_PASSWORD_FILE.")  # fmt: skip
@option("--foreign", "foreign_s", type=FOREIGN, group=SHARING, help="Interval at which a directory is listed again for "
        "objects of programs other than mounts. auto: --metadata-ttl if one LIST answers for many directories, as in a "
        "lake of up to 1,000 plain objects; elsewhere it doubles, up to 1h, each time that no such object is found. "
        "Give a duration if other programs put objects into a large lake.  [default: auto]")  # fmt: skip
@_setting("--delete-after", "delete_after_s", type=DURATION, group=SHARING, help="Time for which an object stays in "
        "the store after its file was removed or replaced, because other mounts that have not seen the change may "
        "still rename the file. Use less than 5m only for a lake with one mount.")  # fmt: skip
@_setting("--hard-links", "hard_links", type=click.Choice(HARD_LINKS), group=SHARING, help="Whether link(2) is "
        "allowed: only if the store prevents two mounts from linking the same name (auto); also if only programs of "
        "this mount are prevented from that (local); or never (refuse). Delta Lake and Lance publish by "
        "link.")  # fmt: skip
@_setting("--maintenance", "maintenance", type=click.Choice(MAINTENANCE), group=SHARING, help="Whether this mount "
        "folds commits and collects garbage when that is due, in a process of the lowest priority (auto), or leaves it "
        "to other mounts (off). One mount of a lake does it at a time. Turn it off on nodes whose CPU and network are "
        "reserved for the job, and leave it on elsewhere.")  # fmt: skip
@option("--allow-other", is_flag=True, group=SHARING, help="Let other users access the mount. An ordinary user needs "
        "user_allow_other in /etc/fuse.conf.")  # fmt: skip
@option("--uid", type=Number(0, 2 ** 32 - 2), metavar="ID", group=SHARING, help="Owner of files whose objects "
        "store none.  [default: yours]")  # fmt: skip
@option("--gid", type=Number(0, 2 ** 32 - 2), metavar="ID", group=SHARING, help="Group of files whose objects "
        "store none.  [default: yours]")  # fmt: skip
@_setting("--file-mode", "file_mode", type=OCTAL_MODE, group=SHARING, help="Mode, in octal, of files whose objects "
        "store none.")  # fmt: skip
@_setting("--dir-mode", "dir_mode", type=OCTAL_MODE, group=SHARING, help="Mode, in octal, of directories that store "
        "none.")  # fmt: skip
@option("--log-file", type=LocalPath(), metavar="FILE", group=DIAGNOSTICS, help="Log of the daemon, rotated at 10 "
        "MiB.  [default: one per mountpoint in the user's state directory]")  # fmt: skip
@_setting("--log-level", "log_level", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
        group=DIAGNOSTICS, help="Lowest severity that is logged. Use DEBUG to report a problem.")  # fmt: skip
@option("--foreground", is_flag=True, group=DIAGNOSTICS, help="Stay in the foreground and log to standard error. Use "
        "it in a container or a service.")  # fmt: skip
@option("--print-systemd-unit", is_flag=True, group=DIAGNOSTICS, help="Print a systemd service that makes this mount, "
        "and mount nothing.")  # fmt: skip
@option("--explain", is_flag=True, group=DIAGNOSTICS, help="Print what the mount would do, and mount nothing: every "
        "option with its value and origin, the capabilities of the store, the kernel features that are used, and what "
        "is not secure.")  # fmt: skip
@option("--json", "as_json", is_flag=True, group=DIAGNOSTICS, help="With --explain: print JSON with stable names, for "
        "scripts.")  # fmt: skip
def mount(source: str, mountpoint: str | None, **options: Any) -> None:
    """Mount a lake as a directory.

    \b
      lakefs-fuse mount s3://bucket/prefix /mnt/lake
      lakefs-fuse mount s3://bucket /mnt/lake --endpoint-url http://localhost:8333
      lakefs-fuse mount file:///srv/lake /mnt/lake --durability writeback

    Returns when the mount answers; a daemon serves it in the background. If the daemon of an earlier mount is still
    storing files, the command waits for it first.

    boto3 finds the credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, or the machine's role. They are
    never arguments. A public bucket needs none: --unsigned.

    SIZE is bytes, 500M or 10GiB; RATE is a SIZE per second; DURATION is seconds, 1.5s, 5m, 2h or 7d.
    """
    config = build_config(source, mountpoint, options)
    if options["as_json"] and not options["explain"]:
        raise ConfigError("--json needs --explain: add it, or omit --json")
    if options["explain"]:
        origins = dict.fromkeys(workload_settings(options), f"--profile-for {options['workload']}")
        if options["unsigned"] and options["read_only"] is None:
            origins["read_only"] = "--unsigned"
        explain(config, click.get_current_context(), lambda name: origins.get(name, ""), as_json=options["as_json"])
        return
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
        spawn.exec_in_foreground(config)
    else:
        spawn.start(config)
        _warn_of_limits(config)


def _warn_of_limits(config: MountConfig) -> None:
    """Warn on standard error if the mount may show wrong names, or is read-only although that was not requested."""
    with suppress(LakeError), open_daemon(config.mountpoint) as client:  # it may have ended already
        values = client.statistics()
        if number(section(values, "commits"), "names_missing"):
            click.echo(f"{PROGRAM}: {NAMES_MISSING}", err=True)
        if (why := why_read_only(values)) and not config.read_only:
            click.echo(f"{PROGRAM}: {why}", err=True)


def config_of(args: Sequence[str]) -> MountConfig:
    """The configuration that a command line asks for, with nothing mounted. Raises ConfigError and click.UsageError."""
    context = mount.make_context(f"{PROGRAM} mount", list(args))
    source, mountpoint = str(context.params.pop("source")), context.params.pop("mountpoint")
    return build_config(source, mountpoint, context.params)


def build_config(source: str, mountpoint: str | None, options: Options) -> MountConfig:
    """The checked configuration, with absolute paths, because the daemon works in another directory.

    Raises ConfigError, and LakeError where SOURCE is a path that is not in a mount."""
    if options["unsigned"] and options["read_only"] is None:
        options = {**options, "read_only": True}
    if options["dataset"] is not None:
        options = {**options, **_of_dataset(options)}
    if options["immutable"]:
        _check_immutable(options)
        if options["snapshot"] == "":
            raise ConfigError("--snapshot: the name is empty: leave the option out for the state at mount time")
    elif options["snapshot"] is not None:
        raise ConfigError("--snapshot needs --immutable, because a snapshot cannot be written to: add --immutable")
    typed, options = options, {**options, **workload_settings(options)}
    within = options["immutable"] and "://" not in source
    store = store_within(source, typed) if within else build_store(Source.parse(source), options)
    if mountpoint is None:
        if not within or options["dataset"] is not None:
            raise ConfigError("MOUNTPOINT is missing: name the directory to mount at")
        mountpoint = source
    _check_bounds(options)
    point = real_mountpoint(mountpoint)
    values = given(options, MountConfig.__struct_fields__)
    if "rules" in values:
        values["rules"] = read_rules(os.path.expanduser(values["rules"]))
    if "cluster_cache" in values:
        values["cluster_cache"] = parse_cluster_cache(values["cluster_cache"])
        if store.source.scheme != "s3":
            raise ConfigError(f"--cluster-cache: {store.source} is not an S3 store: leave the option out")
    elif options["trust_cluster_cache"]:
        raise ConfigError("--trust-cluster-cache needs --cluster-cache: name the proxies to trust")
    values |= {
        "cache_dir": absolute(options["cache_dir"]) or default_cache_dir(store, state_of(options)),
        "log_file": absolute(options["log_file"]) or (None if options["foreground"] else default_log_file(point)),
        "read_only": bool(options["read_only"] or options["immutable"]),
        "records_residency": options["dataset"] is not None and not options["read_only"],
    }
    return MountConfig(store=store, mountpoint=point, **values)


def _of_dataset(options: Options) -> Options:
    """The options that --dataset implies. Raises ConfigError."""
    if options["snapshot"] is not None:
        raise ConfigError("--dataset and --snapshot exclude each other: give one of them")
    name = DatasetName.parse_version(options["dataset"])
    return {"immutable": True, "dataset": str(name), "snapshot": name.snapshot}


_OF_WRITING = (
    "staging_bytes_max", "uploads_max", "pack", "pack_threshold_bytes", "delete_after_s", "durability",
    "writeback_delay_s", "publish_s", "staging_timeout_s", "upload_bytes_s_max", "orphans",
    "maintenance", "hard_links", "sse", "storage_class",
)  # fmt: skip
_OF_CHANGES = ("metadata_ttl_s", "foreign_s", "refresh_s", "hints")


def _check_immutable(options: Options) -> None:
    """Raises ConfigError for options without a meaning for an immutable mount."""
    flags = {param.name: param.opts[0] for param in mount.params}
    kind = "an --immutable" if options["dataset"] is None else "a --dataset"
    for names, why in ((_OF_WRITING, "writes nothing"), (_OF_CHANGES, "changes only at `lakefs-fuse refresh`")):
        for name in given(options, names):
            raise ConfigError(f"{flags[name]}: {kind} mount {why}: leave one of the two out")


def workload_settings(options: Options) -> dict[str, Any]:
    """The values that --profile-for gives to options that were not given. Raises ConfigError."""
    workload = options.get("workload")
    if workload is None:
        return {}
    if workload in OF_WRITERS and (options["read_only"] or options["immutable"]):
        raise ConfigError(
            f"--profile-for {workload} is for writable mounts: omit it, or --read-only, --immutable and --unsigned"
        )
    meaningless = {*_OF_WRITING, *_OF_CHANGES} if options["immutable"] else set[str]()
    return {
        name: value
        for name, value in settings_of(workload, mount).items()
        if options.get(name) is None and name not in meaningless
    }


def store_within(path: str, options: Options) -> StoreConfig:
    """The store and prefix that a directory in a mount shows. Raises LakeError."""
    place = find_place(path, options)
    return place_below(place.store, place.path)


def _check_bounds(options: Options) -> None:
    """Raises ConfigError for a value outside its bounds."""
    if options["pack_threshold_bytes"] is not None:
        check_pack_threshold(options["pack_threshold_bytes"], "--pack-threshold")
    memory = options["memory_bytes_max"]
    if memory is not None and memory < MEMORY_BYTES_MIN:
        raise ConfigError(f"--memory {memory / MIB:g}MiB: expected {MEMORY_BYTES_MIN >> 20}MiB or more")
    cache = options["cache_bytes_max"]
    if cache is not None and cache < CACHE_BYTES_MIN:
        raise ConfigError(f"--cache-size {format_bytes(cache)}: expected {CACHE_BYTES_MIN >> 20}MiB or more")
    staging = options["staging_bytes_max"]
    if staging is not None and staging < STAGING_BYTES_MIN:
        raise ConfigError(f"--staging-size {format_bytes(staging)}: expected {STAGING_BYTES_MIN >> 20}MiB or more")
    if options["hints"]:
        preflight.check_hints(options["hints"])
    if options["publish_s"] is not None:
        check_publish(options["publish_s"], "--publish")
    if options["refresh_s"] is not None and options["refresh_s"] < REFRESH_S_MIN:
        raise ConfigError(f"--refresh {options['refresh_s']:g}: expected {REFRESH_S_MIN:g} s or more")


def state_of(options: Options) -> str:
    """The name of the fixed state that is shown; empty for a mount that follows the lake."""
    return f"immutable {options['snapshot'] or ''}" if options["immutable"] else ""


def default_cache_dir(store: StoreConfig, state: str = "") -> str:
    """One directory for each source, endpoint and profile, and for each fixed state of it."""
    identity = "\n".join(store.meant) if store.source.scheme == "s3" else str(store.source)
    identity += f"\n{state}" if state else ""
    return str(Path(platformdirs.user_cache_dir(PROGRAM)) / hashlib.sha256(identity.encode()).hexdigest()[:16])


def default_log_file(mountpoint: str) -> str:
    """One file for each mountpoint, named after it."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", mountpoint).strip("-")[-60:] or "root"
    digest = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:8]
    return str(Path(platformdirs.user_state_dir(PROGRAM)) / "log" / f"{readable}-{digest}.log")
