"""How a job reaches bytes: by paths below a directory, or with a bare store client. What is timed is the same for both.

An `Access` is made in the process that measures and travels to those that work, where the client is made (`ready`).
Names are relative to its root. Store clients do what one writes with them without a filesystem: large objects in ranges
and parts, eight at a time; a rename is a copy and a delete for each key.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, Protocol

from tests.servers import REGION, Server, s3_client

AT_ONCE = 8
PART_BYTES = 16 << 20
RANGE_BYTES = 8 << 20
READ_BYTES = 1 << 20
Done = Callable[[], bool]
"""Whether the time is over."""


def never() -> bool:
    return False


class Access(Protocol):
    """What a job may do."""

    def ready(self) -> None:
        """Whatever is needed once in a process, so that it is not timed."""

    def names(self, directory: str) -> list[str]: ...
    def look(self, directory: str, done: Done) -> int:
        """Lists it and looks at each name's size and mtime; answers at how many."""

    def read(self, name: str) -> int:
        """A small file, whole; answers its size."""

    def read_range(self, name: str, offset: int, size: int) -> int: ...
    def read_through(self, name: str, done: Done) -> int:
        """A large one from its beginning; answers how many bytes came."""

    def write(self, name: str, data: bytes) -> None: ...
    def saver(self, write: Callable[[BinaryIO], None]) -> Callable[[str], None]:
        """Saves what ``write`` writes into a file, under a name. Clients have the bytes in memory before, not timed."""

    def load(self, name: str, read: Callable[[Any], object]) -> None:
        """``read`` is given a path or a file."""

    def make_directory(self, name: str) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def remove(self, directory: str, done: Done) -> int:
        """Everything below a directory; answers how many files."""


@dataclass(frozen=True)
class Paths:
    """Below a directory of a mount, or of the local disk."""

    root: str

    def ready(self) -> None:
        os.stat(self.root)

    def names(self, directory: str) -> list[str]:
        return os.listdir(f"{self.root}/{directory}")

    def look(self, directory: str, done: Done) -> int:
        found = 0
        for name in os.listdir(f"{self.root}/{directory}"):
            os.stat(f"{self.root}/{directory}/{name}")
            found += 1
            if done():
                break
        return found

    def read(self, name: str) -> int:
        return self.read_through(name, never)

    def read_range(self, name: str, offset: int, size: int) -> int:
        with self._open(name) as descriptor:
            return len(os.pread(descriptor, size, offset))

    def read_through(self, name: str, done: Done) -> int:
        total = 0
        with self._open(name) as descriptor:
            while piece := len(os.read(descriptor, READ_BYTES)):
                total += piece
                if done():
                    break
        return total

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        descriptor = os.open(f"{self.root}/{name}", os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def write(self, name: str, data: bytes) -> None:
        with open(f"{self.root}/{name}", "wb", buffering=0) as file:
            file.write(data)

    def saver(self, write: Callable[[BinaryIO], None]) -> Callable[[str], None]:
        def save(name: str) -> None:
            with open(f"{self.root}/{name}", "wb") as file:
                write(file)

        return save

    def load(self, name: str, read: Callable[[Any], object]) -> None:
        read(f"{self.root}/{name}")

    def make_directory(self, name: str) -> None:
        os.mkdir(f"{self.root}/{name}")

    def rename(self, old: str, new: str) -> None:
        os.rename(f"{self.root}/{old}", f"{self.root}/{new}")

    def remove(self, directory: str, done: Done) -> int:
        removed = 0
        top = f"{self.root}/{directory}"
        for name in os.listdir(top):
            os.unlink(f"{top}/{name}")
            removed += 1
            if done():
                return removed
        shutil.rmtree(top)
        return removed


@dataclass(frozen=True)
class Keys:
    """What store clients share: the keys below a prefix of a bucket."""

    url: str
    bucket: str
    prefix: str

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}".strip("/")

    def make_directory(self, name: str) -> None:
        """Keys need none."""

    @cached_property
    def _boto3(self) -> Any:
        return s3_client(Server("store", self.url))

    def _sizes(self, directory: str) -> dict[str, int]:
        pages = self._boto3.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.key(directory) + "/"
        )
        return {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", ())}

    def rename(self, old: str, new: str) -> None:
        keys = [key for key in self._sizes(old) if not key.endswith("/")]

        def copy(key: str) -> None:
            target = self.key(new) + key[len(self.key(old)) :]
            self._boto3.copy_object(Bucket=self.bucket, Key=target, CopySource={"Bucket": self.bucket, "Key": key})

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(copy, keys))
        self._delete(keys)

    def remove(self, directory: str, done: Done) -> int:
        keys = list(self._sizes(directory))
        self._delete(keys)
        return sum(not key.endswith("/") for key in keys)

    def _delete(self, keys: list[str]) -> None:
        for first in range(0, len(keys), 1000):
            found = [{"Key": key} for key in keys[first : first + 1000]]
            self._boto3.delete_objects(Bucket=self.bucket, Delete={"Objects": found, "Quiet": True})

    def size(self, name: str) -> int:
        return int(self._boto3.head_object(Bucket=self.bucket, Key=self.key(name))["ContentLength"])

    def read_range(self, name: str, offset: int, size: int) -> int:
        raise AssertionError("each client has its own")

    def read_through(self, name: str, done: Done) -> int:
        size = self.size(name)
        starts = range(0, size, RANGE_BYTES)

        def part(start: int) -> int:
            return 0 if done() else self.read_range(name, start, min(RANGE_BYTES, size - start))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return sum(pool.map(part, starts))


@dataclass(frozen=True)
class Boto3(Keys):
    """boto3, as its documentation uses it."""

    def ready(self) -> None:
        self._boto3.head_bucket(Bucket=self.bucket)

    def names(self, directory: str) -> list[str]:
        return [key.rpartition("/")[2] for key in self._sizes(directory) if not key.endswith("/")]

    def look(self, directory: str, done: Done) -> int:
        return len(self._sizes(directory))

    def read(self, name: str) -> int:
        return len(self._boto3.get_object(Bucket=self.bucket, Key=self.key(name))["Body"].read())

    def read_range(self, name: str, offset: int, size: int) -> int:
        wanted = f"bytes={offset}-{offset + size - 1}"
        return len(self._boto3.get_object(Bucket=self.bucket, Key=self.key(name), Range=wanted)["Body"].read())

    def write(self, name: str, data: bytes) -> None:
        self._boto3.put_object(Bucket=self.bucket, Key=self.key(name), Body=data)

    @property
    def _transfer(self) -> Any:
        from boto3.s3.transfer import TransferConfig

        return TransferConfig(
            multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=AT_ONCE, use_threads=True
        )

    def saver(self, write: Callable[[BinaryIO], None]) -> Callable[[str], None]:
        buffer = io.BytesIO()
        write(buffer)
        buffer.seek(0)
        return lambda name: self._boto3.upload_fileobj(buffer, self.bucket, self.key(name), Config=self._transfer)

    def load(self, name: str, read: Callable[[Any], object]) -> None:
        buffer = io.BytesIO()
        self._boto3.download_fileobj(self.bucket, self.key(name), buffer, Config=self._transfer)
        buffer.seek(0)
        read(buffer)


@dataclass(frozen=True)
class Obstore(Keys):
    """obstore: Rust's object_store for Python. What it has no call for (listing without a copy of it) is boto3's."""

    @cached_property
    def _store(self) -> Any:
        from obstore.store import S3Store

        return S3Store(
            self.bucket, endpoint=self.url, region=REGION, client_options={"allow_http": True},
            virtual_hosted_style_request=False,
        )  # fmt: skip

    def ready(self) -> None:
        import obstore

        for _ in obstore.list(self._store, prefix=self.key("nothing-there"), chunk_size=1):
            pass

    def _listed(self, directory: str) -> Iterator[str]:
        import obstore

        for batch in obstore.list(self._store, prefix=self.key(directory)):
            for item in batch:
                yield item["path"]

    def names(self, directory: str) -> list[str]:
        return [path.rpartition("/")[2] for path in self._listed(directory)]

    def look(self, directory: str, done: Done) -> int:
        return sum(1 for _ in self._listed(directory))

    def read(self, name: str) -> int:
        import obstore

        return len(obstore.get(self._store, self.key(name)).bytes())

    def read_range(self, name: str, offset: int, size: int) -> int:
        import obstore

        return len(obstore.get_range(self._store, self.key(name), start=offset, length=size))

    def write(self, name: str, data: bytes) -> None:
        import obstore

        obstore.put(self._store, self.key(name), data, use_multipart=False)

    def saver(self, write: Callable[[BinaryIO], None]) -> Callable[[str], None]:
        import obstore

        buffer = io.BytesIO()
        write(buffer)
        data = buffer.getbuffer()

        def save(name: str) -> None:
            obstore.put(
                self._store, self.key(name), data, use_multipart=len(data) > PART_BYTES, chunk_size=PART_BYTES,
                max_concurrency=AT_ONCE,
            )  # fmt: skip

        return save

    def load(self, name: str, read: Callable[[Any], object]) -> None:
        import obstore

        size = self.size(name)
        starts = list(range(0, size, RANGE_BYTES))

        def part(start: int) -> Any:
            length = min(RANGE_BYTES, size - start)
            return obstore.get_range(self._store, self.key(name), start=start, length=length)

        buffer = bytearray(size)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for start, piece in zip(starts, pool.map(part, starts), strict=True):
                buffer[start : start + len(piece)] = memoryview(piece)
        read(io.BytesIO(buffer))
