"""The proxies that other tests rely on do what they say."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.servers import Server, latency, s3_client


def test_latency(seaweed: Server, new_bucket: Callable[[Server], str], tmp_path: Path) -> None:
    bucket = new_bucket(seaweed)
    s3_client(seaweed).put_object(Bucket=bucket, Key="a", Body=b"bytes")
    with latency(seaweed, tmp_path, delay_ms=30) as slow:
        client = s3_client(slow)
        client.head_object(Bucket=bucket, Key="a")
        began = time.monotonic()
        for _ in range(5):
            assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == b"bytes"
        assert time.monotonic() - began >= 5 * 0.030
        client.close()
