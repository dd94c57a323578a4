"""Every reason not to start a daemon, and what the user is told to do about it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.cli import preflight, run
from lakefs_fuse.cli.preflight import Host
from lakefs_fuse.config import TIB, MountConfig, Source, StoreConfig
from lakefs_fuse.control.mounts import mount_at, mount_of, read_mounts
from lakefs_fuse.errors import CacheError, LakeError, MountError

ROOT_MOUNT = "22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A machine on which an ordinary user can mount."""
    (tmp_path / "dev_fuse").touch()
    (tmp_path / "fuse.conf").write_text("# comment\nuser_allow_other\n")
    (tmp_path / "mountinfo").write_text(ROOT_MOUNT)
    return Host(
        tmp_path / "dev_fuse", tmp_path / "fuse.conf", tmp_path / "mountinfo", 1000, lambda name: f"/usr/bin/{name}"
    )


@pytest.fixture
def config(tmp_path: Path) -> MountConfig:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "data").mkdir()
    return MountConfig(
        store=StoreConfig(source=Source.parse(f"file://{tmp_path}/data")),
        mountpoint=str(tmp_path / "mnt"),
        cache_dir=str(tmp_path / "cache"),
        free_bytes_min=0,
        allow_other=True,
    )


def message(config: MountConfig, host: Host) -> str:
    """What the user is told: one line."""
    with pytest.raises(LakeError) as raised:
        preflight.check(config, host)
    assert isinstance(raised.value, MountError | CacheError)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def replaced(host: Host, **changes: object) -> Host:
    fields = {name: getattr(host, name) for name in ("dev_fuse", "fuse_conf", "mountinfo", "uid", "which")}
    return Host(**{**fields, **changes})


def test_nothing_wrong_makes_the_cache_directory_and_nothing_else(
    config: MountConfig, host: Host, tmp_path: Path
) -> None:
    before = set(tmp_path.iterdir())
    preflight.check(config, host)
    assert set(tmp_path.iterdir()) - before == {tmp_path / "cache"}
    assert list((tmp_path / "cache").iterdir()) == []
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_a_mountpoint_need_not_be_empty(config: MountConfig, host: Host) -> None:
    assert preflight.check(config, host) == []
    (Path(config.mountpoint) / "file").touch()
    (note,) = preflight.check(config, host)
    assert note == f"mountpoint {config.mountpoint} is not empty: the mount hides its contents until it ends"


def test_a_mountpoint_that_is_not_there(config: MountConfig, host: Host) -> None:
    Path(config.mountpoint).rmdir()
    assert f"run `mkdir -p {config.mountpoint}`" in message(config, host)


def test_a_mountpoint_that_is_a_file(config: MountConfig, host: Host) -> None:
    Path(config.mountpoint).rmdir()
    Path(config.mountpoint).touch()
    assert "is not a directory" in message(config, host)


def test_a_mountpoint_in_use(config: MountConfig, host: Host) -> None:
    line = f"40 22 0:50 / {config.mountpoint} rw - fuse.sshfs me@host: rw,user_id=1000\n"
    host.mountinfo.write_text(ROOT_MOUNT + line)
    told = message(config, host)
    assert "in use (me@host:, fuse.sshfs)" in told
    assert f"lakefs-fuse umount {config.mountpoint}" in told


@pytest.mark.parametrize(
    ("call", "code", "advice"),
    [("statvfs", errno.ENOTCONN, "lakefs-fuse umount"), ("stat", errno.EACCES, "Permission denied")],
)
def test_a_mountpoint_that_does_not_answer(
    config: MountConfig, host: Host, monkeypatch: pytest.MonkeyPatch, call: str, code: int, advice: str
) -> None:
    real: Callable[..., object] = getattr(os, call)

    def refuse(path: object, **options: object) -> object:
        if path == config.mountpoint:
            raise OSError(code, os.strerror(code), path)
        return real(path, **options)

    monkeypatch.setattr(os, call, refuse)
    assert advice in message(config, host)


def test_no_device(config: MountConfig, host: Host) -> None:
    host.dev_fuse.unlink()
    told = message(config, host)
    assert "modprobe fuse" in told
    assert "--device /dev/fuse" in told


def test_a_device_that_is_not_open_to_us(config: MountConfig, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != host.dev_fuse and real(path, mode))
    assert f"chmod 666 {host.dev_fuse}" in message(config, host)


def test_a_mountpoint_of_someone_else(config: MountConfig, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != config.mountpoint and real(path, mode))
    assert "not writable for you" in message(config, host)
    preflight.check(config, replaced(host, uid=0))


def test_ordinary_users_need_fusermount3_and_root_does_not(config: MountConfig, host: Host) -> None:
    without = replaced(host, which=lambda name: None)
    assert "install the package fuse3" in message(config, without)
    preflight.check(config, replaced(without, uid=0))


def test_ordinary_users_cannot_mount_into_a_mount_of_theirs_alone(
    config: MountConfig, host: Host, tmp_path: Path
) -> None:
    """fusermount3 is root's, and FUSE lets not even root in; the kernel would only say that permission is denied."""
    outer = f"30 22 0:40 / {tmp_path} rw - fuse.sshfs host: rw,user_id=1000,group_id=5"
    host.mountinfo.write_text(f"{ROOT_MOUNT}{outer}\n")
    told = message(config, host)
    assert f"lies in the FUSE mount {tmp_path}" in told
    assert "--allow-other" in told
    preflight.check(config, replaced(host, uid=0))
    host.mountinfo.write_text(f"{ROOT_MOUNT}{outer},allow_other\n")
    preflight.check(config, host)


@pytest.mark.parametrize("conf", ["", "#user_allow_other\n", None])
def test_allow_other_needs_permission_but_for_root(config: MountConfig, host: Host, conf: str | None) -> None:
    host.fuse_conf.unlink() if conf is None else host.fuse_conf.write_text(conf)
    assert "add the line `user_allow_other`" in message(config, host)
    preflight.check(config, replaced(host, uid=0))
    preflight.check(msgspec.structs.replace(config, allow_other=False), host)


def test_cache_directory_in_a_mounted_lake_is_refused(config: MountConfig, host: Host, tmp_path: Path) -> None:
    (tmp_path / "outer").mkdir()
    host.mountinfo.write_text(
        f"{ROOT_MOUNT}30 22 0:40 / {tmp_path}/outer rw - fuse.lakefs s3://b/ rw,user_id=1000,group_id=5\n"
    )
    (tmp_path / "alias").symlink_to("outer")
    told = message(msgspec.structs.replace(config, cache_dir=f"{tmp_path}/alias/cache"), host)
    assert f"is in the lake that is mounted at {tmp_path}/outer: choose a --cache-dir on a local disk" in told
    assert list((tmp_path / "outer").iterdir()) == [], "nothing was made there"


def test_cache_directory_with_files_of_others_is_refused(config: MountConfig, host: Host, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    shared.chmod(0o1777)
    (shared / "lost+found").mkdir()
    of_shared = msgspec.structs.replace(config, cache_dir=str(shared))
    (shared / "other").touch()
    assert f"give --cache-dir a separate directory, such as {shared}/lakefs-fuse" in message(of_shared, host)
    assert (sorted(os.listdir(shared)), stat.S_IMODE(shared.stat().st_mode)) == (["lost+found", "other"], 0o1777)
    (shared / "meta").mkdir()  # a cache that something was put into
    preflight.check(of_shared, host)
    shutil.rmtree(shared / "meta")
    (shared / "other").unlink()
    preflight.check(of_shared, host)  # the root of a disk of its own


@pytest.mark.parametrize("command", ["snapshot", "fsck"])
def test_command_refuses_a_cache_directory_with_files_of_others(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "other").touch()
    assert run([command, f"file://{tmp_path}", "--cache-dir", str(shared)]) == 1
    assert "has files that do not belong to a cache" in capsys.readouterr().err
    assert (os.listdir(shared), stat.S_IMODE(shared.stat().st_mode)) == (["other"], 0o1777)


def test_fsck_refuses_a_directory_that_no_mount_has_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert run(["fsck", f"file://{tmp_path}", "--cache-dir", str(tmp_path / "empty")]) == 1
    assert "is not the cache directory of a node" in capsys.readouterr().err
    assert os.listdir(tmp_path / "empty") == []


def test_a_cache_directory_that_cannot_be_made(config: MountConfig, host: Host, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "cache", tmp_path / "file"):
        told = message(msgspec.structs.replace(config, cache_dir=str(path)), host)
        assert "cannot be written to (Not a directory): choose one with --cache-dir" in told


def test_a_cache_directory_on_a_read_only_disk(config: MountConfig, host: Host) -> None:
    assert "--cache-dir" in message(msgspec.structs.replace(config, cache_dir="/proc/lakefs-cache"), host)


def test_not_enough_disk(config: MountConfig, host: Host) -> None:
    told = message(msgspec.structs.replace(config, free_bytes_min=900 * TIB), host)
    assert "not enough disk" in told
    assert "900.0 TiB must stay free" in told


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"mountpoint": "cache/mnt"}, "the mountpoint .* lies inside the cache directory"),
        ({"cache_dir": "mnt/cache"}, "the cache directory .* lies inside the mountpoint"),
        ({"cache_dir": "mnt"}, "lies inside"),
        ({"mountpoint": "data/mnt"}, "the mountpoint .* lies inside the source"),
        ({"cache_dir": "data/cache"}, "the cache directory .* lies inside the source"),
        ({"source": "mnt/data"}, "the source .* lies inside the mountpoint"),
        ({"source": "alias"}, "lies inside"),
    ],
)
def test_what_lies_in_one_another(
    config: MountConfig, host: Host, tmp_path: Path, changes: dict[str, str], advice: str
) -> None:
    (tmp_path / "alias").symlink_to("mnt")
    absolute = {name: str(tmp_path / path) for name, path in changes.items()}
    if source := absolute.pop("source", None):
        config = msgspec.structs.replace(config, store=StoreConfig(source=Source.parse(f"file://{source}")))
    config = msgspec.structs.replace(config, **absolute)
    with pytest.raises(MountError, match=advice):
        preflight.check(config, host)


def test_neighbours_with_a_common_beginning_are_apart(config: MountConfig, host: Host, tmp_path: Path) -> None:
    preflight.check(msgspec.structs.replace(config, cache_dir=str(tmp_path / "mnt-cache")), host)


def test_mountinfo_as_the_kernel_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "mountinfo"
    path.write_text(
        ROOT_MOUNT
        + "30 22 0:40 / /mnt/my\\040lake rw,nosuid shared:5 master:2 - fuse.lakefs s3://b/ rw,user_id=1000,group_id=5\n"
        + "31 22 0:41 / /mnt rw - tmpfs tmpfs rw\n"
        + "32 22 0:42 / /tmp/a\rb\x0c rw - tmpfs tmpfs rw\n",  # not escaped
        newline="",
    )
    assert [mount.mountpoint for mount in read_mounts(path)] == ["/", "/mnt/my lake", "/mnt", "/tmp/a\rb\x0c"]
    lake = mount_at("/mnt/my lake", path)
    assert lake is not None
    assert (lake.fstype, lake.source, lake.owner, lake.is_fuse) == ("fuse.lakefs", "s3://b/", 1000, True)
    assert mount_at("/mnt/my", path) is None
    inner, outer = mount_of("/mnt/my lake/a/b", path), mount_of("/mnt/my lakes", path)
    assert inner is not None
    assert outer is not None
    assert (inner.mountpoint, outer.mountpoint) == ("/mnt/my lake", "/mnt")
    assert not outer.is_fuse
