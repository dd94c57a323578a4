"""Options of the store, as a mount uses them: a bucket that everybody may read, and objects stored with a key."""

from __future__ import annotations

import errno

import pytest

from tests import servers
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import LARGE_BYTES, RECORD, Bucket, noise
from tests.recording import recording
from tests.servers import Server

DATA = b"for everybody"


def test_public_bucket_is_mounted_without_a_signature_and_read_only(moto: Server, make_lake: LakeMaker) -> None:
    with recording(moto) as recorder:
        lake = make_lake("moto", "--unsigned", through=recorder.server)
        outside = lake.outside
        assert isinstance(outside, Bucket)
        outside.client.put_bucket_acl(Bucket=outside.bucket, ACL="public-read")
        key = outside.source_prefix + "dir/data"
        outside.client.put_object(Bucket=outside.bucket, Key=key, Body=DATA, ACL="public-read")
        lake.mount()
        try:
            assert (lake.path / "dir" / "data").read_bytes() == DATA
            with pytest.raises(OSError, match="Read-only file system") as refused:
                (lake.path / "new").write_bytes(b"x")
            assert refused.value.errno == errno.EROFS
        finally:
            lake.umount()
        assert {request.method for request in recorder.requests} <= {"GET", "HEAD"}
        assert not any("authorization" in request.headers for request in recorder.requests)
        assert not any(servers.ACCESS_KEY in request.path for request in recorder.requests)
        assert {request.client for request in recorder.requests} >= {"obstore", "list"}


def test_everything_that_a_mount_stores_is_encrypted_and_files_have_the_class(make_lake: LakeMaker) -> None:
    lake = make_lake("moto", "--sse", "kms:some-key", "--storage-class", "STANDARD_IA")
    outside = lake.outside
    assert isinstance(outside, Bucket)
    large = noise(LARGE_BYTES)
    assert lake.try_mount().returncode == 0, lake.log()  # What its probe finds is not for other lakes.
    lake.pid = lake.number("daemon.pid")
    (lake.path / "small").write_bytes(DATA)
    (lake.path / "large").write_bytes(large)
    (lake.path / "large").rename(lake.path / "renamed")
    assert (lake.path / "small").read_bytes() == DATA
    assert (lake.path / "renamed").read_bytes() == large
    lake.umount()
    classes = dict[str, str]()
    for key in (RECORD, *outside.objects()):
        found = outside.client.head_object(Bucket=outside.bucket, Key=outside.source_prefix + key)
        assert (found["ServerSideEncryption"], found["SSEKMSKeyId"]) == ("aws:kms", "some-key"), key
        classes[key] = found.get("StorageClass", "STANDARD")
    assert classes.pop("small") == "STANDARD_IA"
    assert classes[RECORD] == "STANDARD"
    assert "STANDARD_IA" in classes.values(), "the large file, wherever it lies"
