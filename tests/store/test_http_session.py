"""Connections to a store over TLS, and what they cost this machine."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.errors import NotCarriedOut
from lakefs_fuse.store.s3.access import connect
from lakefs_fuse.store.s3.list_pages import S3Pages
from tests.forward_proxy import make_certificate
from tests.recorded import Answer, answering

EMPTY_LISTING = Answer(200, "<ListBucketResult></ListBucketResult>")


def test_certificates_are_read_once_for_all_connections_until_their_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make_certificate(tmp_path / "store", "IP:127.0.0.1")
    other, _ = make_certificate(tmp_path / "other", "IP:127.0.0.1")
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(other.read_bytes())
    read: list[object] = []
    load = ssl.SSLContext.load_verify_locations

    def counted(context: ssl.SSLContext, *files: str, **named: str) -> None:
        read.append(files or named)
        load(context, *files, **named)

    with answering(EMPTY_LISTING, (certificate, key)) as port:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", counted)
        config = StoreConfig(
            source=Source.parse("s3://bucket/"), endpoint_url=f"https://127.0.0.1:{port}", ca_bundle=str(bundle)
        )
        access = connect(config, SystemClock())

        def list_anew() -> None:
            access.requests.close()
            S3Pages(access).page("", "", "", None, 1000)
            access.uploads.close()
            access.client.upload_part(Bucket="bucket", Key="k", UploadId="id", PartNumber=1, Body=b"")

        with pytest.raises(NotCarriedOut, match="authority"):
            list_anew()
        certificates = bundle.with_suffix(".new")
        certificates.write_bytes(other.read_bytes() + certificate.read_bytes())
        os.replace(certificates, bundle)
        read.clear()
        for _ in range(3):
            list_anew()
        access.close()
    assert read == [(str(bundle),)]
