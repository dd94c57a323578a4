"""Waiting times and metrics of real mounts, scraped by a real Prometheus."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from lakefs_fuse.cli.metric_families import FAMILIES, full_name
from tests.cli.test_metrics import MONITORING, expressions
from tests.faults import faulty
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import CLI, MIB, Lake, eventually, noise
from tests.servers import Server, free_port

DELAY_S = 0.3
WATCHED_S_MAX = 30.0
UNKNOWN_YET = "backlog_commits", "last_fold_timestamp_seconds", "last_collection_timestamp_seconds"
"""Of maintenance, before the first look."""
RULES = """
[[rule]]
path = "train/**"
"""


@contextmanager
def serving(lake: Lake, *mountpoints: Path) -> Iterator[str]:
    """The metrics of mounts, at a URL."""
    command = [*CLI, "metrics", "--listen", "127.0.0.1:0", *map(str, mountpoints)]
    with subprocess.Popen(command, env=lake.env, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().removeprefix("serving ").strip()
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(10) == 0


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def drop_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize(
    "mode", [pytest.param((), id="read-write"), pytest.param(("--immutable",), id="immutable", marks=pytest.mark.long)]
)
def test_waiting_times_by_source_and_rule(
    make_lake: LakeMaker, seaweed: Server, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    data = {"train/a": noise(MIB // 2, 1), "other": noise(MIB // 4, 2)}
    with faulty(seaweed) as (server, faults):
        lake = make_lake("seaweedfs", "--rules", str(tmp_path / "rules.toml"), *mode, through=server)
        for name, each in data.items():
            lake.outside.replace(name, each)
        lake.mount()
        for name, each in data.items():
            (lake.path / name).stat()
            faults.hang(1, method="GET", containing=name)
            threading.Timer(DELAY_S, faults.clear).start()
            assert (lake.path / name).read_bytes() == each
        reads = cast(dict[str, Any], lake.stats()["reads"])
        assert {glob: sum(each["bytes"].values()) for glob, each in reads["by_rule"].items()} == {
            "train/**": MIB // 2, "": MIB // 4,
        }  # fmt: skip
        assert all(each["waited_s"]["store"] >= 0.8 * DELAY_S for each in reads["by_rule"].values())
        assert all(each["waited_s"]["disk"] < DELAY_S / 2 for each in reads["by_rule"].values())
        assert reads["count"] == sum(reads["latency_counts"]) > 0
        assert "train/**" in lake.cli("stats", str(lake.path)).stdout
        assert "waiting now" in watched(lake)


def watched(lake: Lake) -> str:
    """What `stats --watch` shows until it has the column of rates, which needs an interval, or the deadline has
    passed. Until then, Ctrl-C could meet a command that is not ready for it."""
    command = [*CLI, "stats", "--watch", "--interval", "0.1s", str(lake.path)]
    with subprocess.Popen(command, env=lake.env, stdout=subprocess.PIPE, text=True) as watching:
        deadline = threading.Timer(WATCHED_S_MAX, watching.kill)
        deadline.start()
        assert watching.stdout is not None
        shown = ""
        while "waiting now" not in shown and (line := watching.stdout.readline()):
            shown += line
        watching.send_signal(signal.SIGINT)
        shown += watching.stdout.read()
        deadline.cancel()
        return shown


def test_file_that_is_being_written_is_read_from_the_disk(make_lake: LakeMaker) -> None:
    """Files that are published while they grow are not in the page cache."""
    lake = make_lake("file", "--publish", "1h").mount()
    with (lake.path / "log").open("w+b", buffering=0) as file:
        file.write(noise(MIB, 3))
        file.seek(0)
        assert len(file.read(MIB)) == MIB
        reads = cast(dict[str, Any], lake.stats()["reads"])
    assert reads["bytes"] == {"memory": 0, "disk": MIB, "store": 0}
    assert reads["waited_s"]["disk"] > 0


@contextmanager
def prometheus(directory: Path, target: str) -> Iterator[str]:
    """A server with the configuration of `deploy/monitoring` that scrapes this address each second; its URL."""
    directory.mkdir()
    config = (MONITORING / "prometheus.yaml").read_text().replace("127.0.0.1:9469", target)
    (directory / "prometheus.yaml").write_text(config.replace("scrape_interval: 15s", "scrape_interval: 1s"))
    shutil.copy(MONITORING / "alerts.yaml", directory)
    url = f"127.0.0.1:{free_port()}"
    command = [
        *("prometheus", f"--config.file={directory / 'prometheus.yaml'}", f"--storage.tsdb.path={directory / 'data'}"),
        f"--web.listen-address={url}",
    ]
    with (directory / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            yield f"http://{url}"
        finally:
            server.terminate()


def query(url: str, expression: str) -> list[dict[str, Any]]:
    """The series of an instant query. Raises HTTPError for one that is wrong."""
    try:
        answer = json.loads(scrape(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"))
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it is starting
            return []
        raise
    except urllib.error.URLError:
        return []
    assert answer["status"] == "success"
    return cast(list[dict[str, Any]], answer["data"]["result"])


def test_prometheus_scrapes_two_mounts_of_which_one_dies(make_lake: LakeMaker, tmp_path: Path) -> None:
    lake = make_lake("file", "--durability", "writeback").mount()
    other = make_lake("file", "--no-supervise").mount()
    (lake.path / "f").write_bytes(b"bytes")
    lake.sync()
    drop_page_cache(lake.path / "f")
    assert (lake.path / "f").read_bytes() == b"bytes"
    with serving(lake, lake.path, other.path) as url:
        text = scrape(url)
        sampled = {re.sub(r"_(bucket|count|sum)$", "", line.partition("{")[0]) for line in text.splitlines()}
        unknown_yet = {f"lakefs_fuse_maintenance_{name}" for name in UNKNOWN_YET}
        assert {full_name(family) for family in FAMILIES} - sampled <= unknown_yet
        with prometheus(tmp_path / "prometheus", url.split("/")[2]) as server:
            eventually(lambda: len(query(server, "lakefs_fuse_up == 1")) == 2, "both are scraped", 60.0)
            for expression in expressions():
                query(server, expression)
            (written,) = query(server, f'lakefs_fuse_store_bytes_total{{direction="written",mountpoint="{lake.path}"}}')
            assert float(written["value"][1]) >= len(b"bytes")
            pid = other.number("daemon.pid")
            os.kill(pid, signal.SIGSTOP)
            began_s = time.monotonic()
            assert f'lakefs_fuse_up{{mountpoint="{other.path}"}} 0.0' in scrape(url), "it hangs"
            assert time.monotonic() - began_s < 10
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: len(query(server, "lakefs_fuse_up == 0")) == 1, "one is down", 60.0)
            (down,) = query(server, "lakefs_fuse_up == 0")
            assert down["metric"]["mountpoint"] == str(other.path)
            assert len(query(server, "lakefs_fuse_uptime_seconds")) == 1
        busy = url.split("/")[2]
        refused = lake.cli("metrics", "--listen", busy, str(lake.path))
        assert (refused.returncode, f"cannot listen on {busy}: Address already in use" in refused.stderr) == (2, True)
    once = lake.cli("metrics", str(lake.path))
    assert once.returncode == 0
    assert 'lakefs_fuse_up{mountpoint="' in once.stdout


def test_metrics_of_an_immutable_mount_leave_out_what_it_has_not(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--immutable").mount()
    done = lake.cli("metrics", str(lake.path))
    assert done.returncode == 0
    assert "lakefs_fuse_read_duration_seconds_count" in done.stdout
    assert "lakefs_fuse_staging_bytes{" not in done.stdout
