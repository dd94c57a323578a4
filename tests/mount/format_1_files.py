"""The lake, cache directory and program of format 1 in `tests/fixtures/format_1`.

The lake is an archive of S3 objects, whose ETags are the same in every store; those of a local directory contain inode
numbers, which no archive restores. The endpoint is in the environment, because the cache directory is bound to the
lake's source and the option's value.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import servers
from tests.mount.lakes import CLI, Bucket, Lake
from tests.servers import Server, make_bucket

FIXTURE = Path(__file__).parent.parent / "fixtures" / "format_1"
BUCKET, PREFIX = "format-1", "some/lake/"
OPTIONS = ("--attributes", "objects")
"""The store dates objects anew when they are put again: times are those that the objects' metadata say."""
Names = dict[str, dict[str, Any]]
"""What a mount shows: by path, the attributes and content of a file, link or directory."""


def pack_tree(directory: Path, archive: Path) -> None:
    """Everything in a directory: sparse files, extended attributes and times included."""
    command = f"tar -C {directory} --sparse --xattrs --sort=name --owner=0 --group=0 --numeric-owner -c ."
    packed = subprocess.run(command.split(), capture_output=True, check=True).stdout
    archive.write_bytes(subprocess.run(["xz", "-9e"], input=packed, capture_output=True, check=True).stdout)


def unpack_tree(name: str, directory: Path) -> Path:
    """An archive of the fixture, in a new directory."""
    directory.mkdir(mode=0o700, parents=True)
    subprocess.run(
        ["tar", "-C", str(directory), "--xattrs", "--xattrs-include=user.*", "-xJf", str(FIXTURE / name)], check=True
    )
    return directory


def read_names(root: Path) -> Names:
    """All names below a mountpoint."""
    found: Names = {}
    for above, directories, files in os.walk(root):
        for name in [*directories, *files]:
            path = Path(above) / name
            found[str(path.relative_to(root))] = _attributes(path)
    return dict(sorted(found.items()))


def _attributes(path: Path) -> dict[str, Any]:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return {"target": os.readlink(path)}
    xattrs = {
        name: os.getxattr(path, name).decode()
        for name in os.listxattr(path)
        if name.startswith("user.") and not name.startswith("user.lakefs.")
    }
    shown: dict[str, Any] = {"mode": oct(status.st_mode), "xattrs": xattrs}
    if stat.S_ISREG(status.st_mode):
        data = path.read_bytes()
        shown |= {"mtime_ns": status.st_mtime_ns, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return shown


def expected(name: str) -> Names:
    """What the old program showed; ``name`` is that of a JSON file of the fixture."""
    found: Names = json.loads((FIXTURE / name).read_text())
    return found


def save_objects(server: Server, directory: Path) -> None:
    """Write all objects of the lake to a directory."""
    client = servers.s3_client(server)
    about = []
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=PREFIX)
    for number, item in enumerate(item for page in pages for item in page.get("Contents", ())):
        answer = client.get_object(Bucket=BUCKET, Key=item["Key"])
        (directory / f"{number:04}").write_bytes(answer["Body"].read())
        about.append({"key": item["Key"][len(PREFIX) :], "metadata": answer["Metadata"], "etag": item["ETag"]})
    (directory / "objects.json").write_text(json.dumps(about, indent=1))
    client.close()


def restore_objects(server: Server, directory: Path) -> None:
    """Put the lake into its bucket again, alone."""
    make_bucket(server, BUCKET)
    client = servers.s3_client(server)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    for item in [item for page in pages for item in page.get("Contents", ())]:
        client.delete_object(Bucket=BUCKET, Key=item["Key"])
    objects = unpack_tree("lake.tar.xz", directory)
    for number, about in enumerate(json.loads((objects / "objects.json").read_text())):
        body = (objects / f"{number:04}").read_bytes()
        put = client.put_object(Bucket=BUCKET, Key=PREFIX + about["key"], Body=body, Metadata=about["metadata"])
        assert put["ETag"] == about["etag"], f"{about['key']}: this store's ETags are not those of the fixture"
    client.close()
    shutil.rmtree(objects)


def unpack_program(directory: Path) -> Path:
    """The old program, to be mounted with `use_program`."""
    return unpack_tree("program.tar.xz", directory)


def use_program(lake: Lake, program: Path) -> Lake:
    """Let a lake be mounted by the program in a directory."""
    lake.command = list(CLI)
    lake.env["PYTHONPATH"] = str(program)
    lake.env.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of its processes would compile it
    said = lake.cli("--version")
    assert said.returncode == 0, said.stderr
    where = [sys.executable, "-P", "-c", "import lakefs_fuse; print(lakefs_fuse.__file__)"]
    found = subprocess.run(where, env=lake.env, capture_output=True, text=True, check=True, cwd="/").stdout
    assert found.startswith(str(program)), found
    return lake


def kept_lake(server: Server, directory: Path, *options: str) -> Lake:
    """The lake of the fixture on a server, not mounted yet."""
    outside = Bucket(server, BUCKET, PREFIX)
    lake = Lake(outside, outside.source, directory, *options)
    lake.env |= {"AWS_ENDPOINT_URL_S3": server.url, "AWS_DEFAULT_REGION": servers.REGION}
    return lake


def end(lake: Lake) -> None:
    """Its mount and its connections."""
    lake.close()
    assert isinstance(lake.outside, Bucket)
    lake.outside.client.close()
