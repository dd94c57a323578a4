"""`lakefs-fuse mount … --print-systemd-unit`: a systemd service that makes the same mount.

``Type=notify``: the process in the foreground (supervisor, or daemon without one) notifies systemd when the mount
answers. Stopping the service stores everything first. *No credentials in units*, which anyone may read: they come from
an environment file, or from the other places where boto3 looks.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from pathlib import Path

import click
from click.core import ParameterSource

from lakefs_fuse.cli.parameters import FOREIGN, OCTAL_MODE
from lakefs_fuse.cli.store_options import absolute
from lakefs_fuse.config import MountConfig
from lakefs_fuse.product import FILESYSTEM, PROGRAM

_LEFT_OUT = frozenset({"mount_o", "print_systemd_unit", "explain", "as_json", "foreground", "cache_dir"})
"""Options that a unit always has, or expresses in another way."""
_NAME_CHARACTERS = 100

SYSTEM_UNIT = """\
# /etc/systemd/system/{name}.service: then `systemctl daemon-reload` and `systemctl enable --now {name}`.
# Credentials, and whatever else boto3 takes from the environment, go into {environment_file}
# (mode 0600) as lines like AWS_ACCESS_KEY_ID=…; without that file, ~/.aws of root or the machine's role are asked.
[Unit]
Description=Lake {source} at {mountpoint}
Wants=network-online.target
After=network-online.target
RequiresMountsFor={directories}

[Service]
Type=notify
EnvironmentFile=-{environment_file}
{service}
[Install]
WantedBy=multi-user.target
"""

USER_UNIT = """\
# ~/.config/systemd/user/{name}.service: then `systemctl --user daemon-reload` and
# `systemctl --user enable --now {name}`; `loginctl enable-linger` starts it without a login.
# Credentials, and whatever else boto3 takes from the environment, go into
# ~/.config/lakefs-fuse/{name}.env (mode 0600) as lines like AWS_ACCESS_KEY_ID=…; without that file, ~/.aws is asked.
[Unit]
Description=Lake {source} at {mountpoint}

[Service]
Type=notify
EnvironmentFile=-%h/.config/lakefs-fuse/{name}.env
{service}
[Install]
WantedBy=default.target
"""

SERVICE = """\
ExecStart={start}
# Stores everything, then unmounts. If that fails, SIGTERM unmounts, and the bytes stay in staging.
ExecStop=-{stop}
KillMode=mixed
TimeoutStartSec=65min
TimeoutStopSec=65min
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2
"""


def unit(config: MountConfig, context: click.Context, *, uid: int, program: tuple[str, ...]) -> str:
    """The unit file for ``config``, which came from ``context``; a user unit unless ``uid`` is root's. Raises
    UsageError for what no unit can have."""
    source, point = str(context.params["source"]), config.mountpoint
    if config.store.source.scheme == "file":
        source = str(config.store.source)
    elif "://" not in source:  # a directory in a mount
        source = os.path.abspath(source)
    start = [*program, "mount", source, point, "--cache-dir", config.cache_dir, *_given(context), "--foreground"]
    directories = dict.fromkeys((os.path.dirname(config.cache_dir), os.path.dirname(point)))
    if config.store.source.scheme == "file":
        directories[config.store.source.bucket] = None
    if odd := next((word for word in start if not word.isprintable()), None):
        raise click.UsageError(f"{odd!r} has characters that no unit file can have: choose another name")
    name = unit_name(point)
    return (SYSTEM_UNIT if uid == 0 else USER_UNIT).format(
        name=name,
        source=_literal(source),
        mountpoint=_literal(point),
        environment_file=f"/etc/lakefs-fuse/{name}.env",
        directories=" ".join(_quoted(_literal(directory)) for directory in directories),
        service=SERVICE.format(start=_command(start), stop=_command([*program, "umount", point])),
    )


def unit_name(mountpoint: str) -> str:
    """A readable name for the service of a mountpoint, such as lakefs-mnt-lake; with a checksum where another
    mountpoint might read the same."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", mountpoint).strip("-")
    if len(name) > _NAME_CHARACTERS or re.search(r"[^A-Za-z0-9._/]", mountpoint):
        name = f"{name[-_NAME_CHARACTERS:].strip('-')}-{zlib.crc32(os.fsencode(mountpoint)):08x}"
    return f"{FILESYSTEM}-{name or 'root'}"


def this_program() -> tuple[str, ...]:
    """The command that runs this installation from any directory."""
    beside = Path(sys.executable).with_name(PROGRAM)
    return (str(beside),) if os.access(beside, os.X_OK) else (sys.executable, "-P", "-m", "lakefs_fuse")


def _given(context: click.Context) -> list[str]:
    """The options of the command line, those in ``-o`` included, as long options."""
    found: list[str] = []
    for param in context.command.params:
        name = param.name or ""
        if not isinstance(param, click.Option) or name in _LEFT_OUT:
            continue
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if param.is_flag:
            found.append((param.opts if value else param.secondary_opts)[0])
        else:
            found.append(f"{param.opts[0]}={_text(param, value)}")
    return found


def _text(param: click.Option, value: object) -> str:
    """``value`` as one types it."""
    if isinstance(param.type, click.Path):
        return str(absolute(str(value)))
    if param.type is OCTAL_MODE and isinstance(value, int):
        return f"{value:o}"
    if param.type is FOREIGN and value is None:
        return "auto"
    if isinstance(value, float):
        return f"{value:.6f}".rstrip("0").rstrip(".")
    return str(value)


def _command(arguments: list[str]) -> str:
    return " ".join(_argument(argument) for argument in arguments)


def _argument(text: str) -> str:
    """``text`` quoted for ExecStart=; see "Command lines" in systemd.service(5)."""
    return _quoted(_literal(text).replace("$", "$$"))


def _quoted(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_./:=@%$+,-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _literal(text: str) -> str:
    return text.replace("%", "%%")
