"""A bucket that everybody may read, mounted without credentials."""

from __future__ import annotations

import errno

import pytest

from tests import servers
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Bucket
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
