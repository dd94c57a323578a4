"""The files that botocore makes a client from: models of services, rules about endpoints, and regions.

`service_files` finds and reads what botocore's own loader does, also in AWS_DATA_PATH and ``~/.aws/models``. Callable
from any thread.
"""

from __future__ import annotations

import functools
import gzip
import os
from contextlib import suppress

import msgspec
from botocore.loaders import JSONFileLoader, Loader

from lakefs_fuse.errors import ConfigError


@functools.cache
def service_files(search_path: str | None) -> Loader:
    """What botocore reads and parses to make a client, kept for the next one: to find a lake takes one for each level
    of the path. ``search_path`` is AWS_DATA_PATH."""
    directories = [os.path.expandvars(each) for each in (search_path or "").split(os.pathsep) if each]
    return _Services(extra_search_paths=list(map(os.path.expanduser, directories)), file_loader=_Files())


class _Files(JSONFileLoader):  # type: ignore[misc]
    """Makes a dict of each object, which keeps its order. botocore makes an OrderedDict: three times the CPU time, and
    4 MiB more for S3."""

    def load_file(self, file_path: str) -> object:
        """The content of a file, which is named without its ending; None if there is none. Raises ConfigError."""
        for ending, open_file in (("json", open), ("json.gz", gzip.open)):
            path = f"{file_path}.{ending}"
            with suppress(FileNotFoundError), open_file(path, "rb") as file:
                return _parsed(path, file.read())
        return None


def _parsed(path: str, text: bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}: repair this file of AWS_DATA_PATH or ~/.aws/models") from error


class _Services(Loader):  # type: ignore[misc]
    """Takes each directory for a service. botocore looks for files in all 400 of them, twice for each client, only to
    check the name of one."""

    def list_available_services(self, type_name: str) -> list[str]:
        """Names of services, of which some may have no file of this type."""
        return sorted({name for path in self.search_paths if os.path.isdir(path) for name in os.listdir(path)})
