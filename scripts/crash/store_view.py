"""What lies in the store, as another program reads it: boto3, and the reader that docs/format.md prints.

Every name of the lake, plain or packed, with the segments its bytes are. Bytes that were looked at once are not read
again (objects are told apart by their ETags, commits never change), so a look costs about two listings.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.crash.content import Damaged, parse
from scripts.crash.tree import Kind, Node
from tests.servers import Server, s3_client

COMMITS = ".lakefs/commits/"
LOOKS_MAX = 20
DANGLING = "is not to be read:"
DOCUMENT = Path(__file__).parents[2] / "docs/format.md"
Places = dict[str, tuple[Any, ...]]


def documented_reader() -> Callable[[dict[str, Any], dict[str, tuple[str, int]]], Places]:
    """The reader of the document; it is given records that were read before instead of archives."""
    (source,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, str(DOCUMENT), "exec"), names)
    record_of, files = names["record_of"], names["files"]
    names["record_of"] = lambda record: record
    files.record_of = record_of
    made: Callable[[dict[str, Any], dict[str, tuple[str, int]]], Places] = files
    return made


class Changed(Exception):
    """An object is not the one that was listed."""


class StoreView:
    """One lake in a bucket; no daemon may be at work on it while it is looked at."""

    def __init__(self, server: Server, bucket: str, prefix: str) -> None:
        self._client, self._bucket, self._prefix = s3_client(server), bucket, prefix
        self._files = documented_reader()
        self._records: dict[str, Any] = {}
        self._nodes: dict[tuple[object, ...], Node] = {}

    def close(self) -> None:
        self._client.close()

    def listing(self) -> dict[str, tuple[str, int]]:
        """Keys with ETag and LastModified (ns)."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        return {
            item["Key"][len(self._prefix) :]: (
                item["ETag"].strip('"'),
                int(item["LastModified"].timestamp()) * 1_000_000_000,
            )
            for page in pages
            for item in page.get("Contents", ())
        }

    def uploads(self) -> list[str]:
        """Keys of unfinished multipart uploads."""
        answer = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=self._prefix)
        return [upload["Key"] for upload in answer.get("Uploads", ())]

    def look(self) -> dict[str, Node]:
        """Files and links by path. What cannot be read is a damaged node. The store may still be at what the daemon
        that died had asked it for: then it is looked at once more."""
        for _ in range(LOOKS_MAX):
            with suppress(Changed):
                return self._look()
        raise Changed("objects go on changing, and nobody is at work")

    def _look(self) -> dict[str, Node]:
        listed = self.listing()
        commits = [key for key in listed if key.startswith(COMMITS) and key.endswith(".zip")]  # else they are bundles
        record_of: Callable[[bytes], Any] = self._files.record_of  # type: ignore[attr-defined]
        for key in commits:
            if key not in self._records:
                self._records[key] = record_of(self._get(key))
        plain = {key: said for key, said in listed.items() if not key.startswith(".lakefs/") and not key.endswith("/")}
        places = self._files({key: self._records[key] for key in commits}, plain)
        return {path: self._node(where, listed) for path, where in places.items()}

    def _node(self, where: tuple[Any, ...], listed: dict[str, tuple[str, int]]) -> Node:
        if where[0] is None:
            return Node(Kind.LINK, target=where[1])
        key, etag, offset, size = where
        there = listed.get(key)
        if there is None or etag not in (None, there[0]):
            return Node(
                Kind.FILE, damage=f"{DANGLING} lies in {key} with ETag {etag}, where there is {there or 'nothing'}"
            )
        known = (key, there[0], offset, size)
        if known not in self._nodes:
            self._nodes[known] = self._read(key, there[0], offset, size)
        return self._nodes[known]

    def _read(self, key: str, etag: str, offset: int, size: int | None) -> Node:
        byte_range = "" if size is None else f"bytes={offset}-{offset + size - 1}"
        try:
            data = b"" if size == 0 else self._get(key, byte_range, etag)
            return Node(Kind.FILE, parse(data))
        except Damaged as error:
            return Node(Kind.FILE, damage=str(error))

    def _get(self, key: str, byte_range: str = "", etag: str = "") -> bytes:
        """Raises Changed where it is gone, or the ETag is another."""
        only = {"Range": byte_range} if byte_range else {}
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key, **only)
        except self._client.exceptions.NoSuchKey as error:
            raise Changed(f"{key} was listed, and is gone") from error
        if etag and answer["ETag"].strip('"') != etag:
            raise Changed
        body: bytes = answer["Body"].read()
        return body

    # -- harm, to see that it is noticed

    def replace(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=data)

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)

    def read(self, key: str) -> bytes:
        return self._get(key)
