"""`lakefs-fuse metrics`: the counters of mounts in Prometheus's text format, printed once or served over HTTP.

A scrape asks the daemons over their control sockets, as `stats` does. The server holds no state: it may be killed and
started again at any time.
"""

from __future__ import annotations

import signal

import click

from lakefs_fuse.cli.daemons import open_daemon
from lakefs_fuse.cli.help import SETTINGS, GroupedCommand, argument, option
from lakefs_fuse.cli.parameters import LocalPath
from lakefs_fuse.control.runtime import real_mountpoint
from lakefs_fuse.errors import ConfigError, LakeError

SCRAPE_S_MAX = 5.0
"""A daemon that takes longer is down; Prometheus gives up a scrape after 10 s."""


@click.command("metrics", cls=GroupedCommand, context_settings=SETTINGS)
@argument("mountpoints", "The directory of each mount.", nargs=-1, required=True, type=LocalPath(readable=False))
@option("--listen", metavar="ADDR:PORT", help="Serve them at http://ADDR:PORT/metrics until interrupted, for scrapes "
        "by Prometheus. Anyone who can reach the address sees what is mounted and how much it is used, but no names or "
        "contents of files.")  # fmt: skip
def metrics(mountpoints: tuple[str, ...], listen: str | None) -> None:
    """Print the counters of mounts in Prometheus's text format.

    Counters start at 0 with the daemon. docs/metrics.md lists them.
    """
    points = tuple(dict.fromkeys(map(real_mountpoint, mountpoints)))
    if listen is None:
        click.echo(_text(points), nl=False)
    else:
        _serve(points, *parse_address(listen))


def _text(mountpoints: tuple[str, ...]) -> str:
    """Raises LakeError where a daemon does not answer."""
    from prometheus_client import generate_latest

    from lakefs_fuse.cli.metric_families import registry_of

    return generate_latest(registry_of(mountpoints, _ask)).decode()


def _ask(mountpoint: str) -> dict[str, object]:
    with open_daemon(mountpoint, silence_s_max=SCRAPE_S_MAX) as client:
        return client.statistics()


def _try_ask(mountpoint: str) -> dict[str, object] | None:
    try:
        return _ask(mountpoint)
    except (LakeError, OSError):
        return None


def _serve(mountpoints: tuple[str, ...], address: str, port: int) -> None:
    """Until a signal. Raises ConfigError where the address cannot be had."""
    from prometheus_client import start_http_server

    from lakefs_fuse.cli.metric_families import registry_of

    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # for `sigwait`; the server's threads inherit it
    try:
        server, _ = start_http_server(port, address, registry_of(mountpoints, _try_ask))
    except OSError as error:
        raise ConfigError(f"--listen: cannot listen on {address}:{port}: {error.strerror}") from error
    host = f"[{address}]" if ":" in address else address
    click.echo(f"serving http://{host}:{server.server_port}/metrics")
    signal.sigwait(ends)
    server.shutdown()


def parse_address(text: str) -> tuple[str, int]:
    """``127.0.0.1:9469`` or ``[::1]:9469``. Raises ConfigError."""
    address, _, port = text.rpartition(":")
    address = address.removeprefix("[").removesuffix("]")
    if not address or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--listen {text!r}: expected ADDR:PORT, for example 127.0.0.1:9469 (0.0.0.0 for all)")
    return address, int(port)
