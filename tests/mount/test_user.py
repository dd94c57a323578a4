"""Mounts of an ordinary user, by fusermount3, which only that user can access."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.counting import costs
from tests.mount.lakes import Directory, Lake, file_lake, noise, s3_lake
from tests.mount.other_user import User, other_user
from tests.servers import Server


@pytest.fixture(scope="module")
def user(dev_fuse: Path) -> Iterator[User]:
    with other_user() as found:
        yield found


@pytest.fixture
def theirs(request: pytest.FixtureRequest, user: User, new_bucket: Callable[[Server], str]) -> Iterator[Lake]:
    """A lake that the user mounts and root looks at; on a local directory unless the test says otherwise."""
    store = getattr(request, "param", "file")
    directory = user.directory / f"lake-{store}"
    directory.mkdir()
    if store == "file":
        manager = file_lake(directory)
    else:
        server: Server = request.getfixturevalue("seaweed")
        manager = s3_lake(server, new_bucket(server), directory)
    with manager as lake:
        lake.command, lake.env = user.command, user.env
        user.own(directory)
        yield lake
    shutil.rmtree(directory)


@pytest.mark.parametrize("theirs", ["file", pytest.param("seaweedfs", marks=pytest.mark.long)], indirect=True)
def test_an_ordinary_user_mounts_writes_reads_unmounts(theirs: Lake, user: User) -> None:
    theirs.outside.replace("more/theirs", noise(50_000))
    theirs.mount()
    assert os.stat(f"/proc/{theirs.pid}").st_uid == user.uid
    script = """
    mkdir d; echo hello > d/f; cat d/f; head -c 100000 /dev/zero > d/zeros; stat -c %u d/f
    printf '#!/bin/sh\\necho it runs\\n' > run; chmod +x run; ./run
    """
    done = user.sh(script, theirs.path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["hello", str(user.uid), "it runs", ""]
    assert theirs.outside.read("d/f") == b"hello\n"
    assert theirs.outside.read("d/zeros") == bytes(100_000)
    again = user.sh("sha256sum d/f | cut -c -8; ls more; wc -c < more/theirs", theirs.path)
    assert again.stdout.split() == ["5891b5b5", "theirs", "50000"], again.stderr
    theirs.umount()
    if isinstance(theirs.outside, Directory):
        assert (theirs.outside.root / "d" / "f").stat().st_uid == user.uid
    theirs.mount()
    assert user.sh("cat d/f", theirs.path).stdout == "hello\n"


def test_nobody_else_gets_in(theirs: Lake, user: User) -> None:
    """Not even root, as FUSE has it without --allow-other; what root may do is ask the daemon."""
    theirs.mount()
    assert user.sh("echo secret > f", theirs.path).returncode == 0
    if os.geteuid() != user.uid:
        with pytest.raises(PermissionError):
            os.listdir(theirs.path)
    sockets = [path for path in (Path(f"/run/user/{user.uid}/lakefs-fuse"), Path(f"/tmp/lakefs-fuse-{user.uid}"))
               if path.exists()]  # fmt: skip
    assert sockets
    for directory in sockets:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert all(socket.stat().st_mode & 0o777 == 0o600 for socket in directory.glob("*.sock"))
    for private in (theirs.cache_dir, theirs.cache_dir / "staging", theirs.log_file):
        assert private.stat().st_mode & 0o077 == 0, private


def test_a_mountpoint_of_somebody_else_is_refused(theirs: Lake, user: User) -> None:
    theirs.path.chmod(0o555)
    refused = theirs.try_mount()
    assert refused.returncode == 1
    assert "not writable for you, which fusermount3 requires" in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.long
def test_the_kernel_remembers_an_ordinary_users_mounts_too(theirs: Lake, user: User) -> None:
    """But reads ahead as it likes: more takes root."""
    theirs.outside.replace("d/f", b"hello\n")
    user.own(theirs.path.parent.parent)
    theirs.env = {name: value for name, value in theirs.env.items() if name != "LAKEFS_FUSE_HOOKS"}
    look = "ls d; ls d; cat d/f; stat -c %s d/f d"
    for options in (
        ("--metadata-ttl", "1h", "--refresh", "1h"),
        ("--immutable", "--cache-dir", str(theirs.cache_dir) + "2"),
    ):
        theirs.mount(*options)
        first = user.sh(look, theirs.path)
        assert first.stdout.split() == ["f", "f", "hello", "6", "0"], first.stderr
        user.sh(look, theirs.path)
        with costs(theirs, **({} if "--immutable" in options else {"getattr": 1, "open": 1, "flush": 1, "release": 1})):
            assert user.sh(look, theirs.path).stdout == first.stdout
        kernel = theirs.stats()["kernel"]
        assert isinstance(kernel, dict)
        assert kernel["stateless_opendir"] is True
        if user.uid != 0:
            assert kernel["read_ahead_kib"] == 128
            assert "raising it takes root" in str(kernel["missing"])
        theirs.umount()
