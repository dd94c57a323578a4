"""The file of `doctor --bundle`: results, statistics, configuration and logs for support, as a ZIP.

*No secrets*: every member goes through a `Redactor`; of the environment it contains only names, and the values of a few
variables. The file is created with mode 0600, and replaces no other file.
"""

from __future__ import annotations

import os
import platform
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from lakefs_fuse import __version__
from lakefs_fuse.checks import CheckResult
from lakefs_fuse.cli.redaction import Redactor, environment_of, secrets_of
from lakefs_fuse.cli.stats_values import number
from lakefs_fuse.control.mounts import MOUNTINFO
from lakefs_fuse.errors import LakeError
from lakefs_fuse.product import ENVIRONMENT_PREFIX

LOG_BYTES_MAX = 8 << 20
"""The end of each log file; a log is rotated at 10 MiB."""
_PACKAGES = ("pyfuse3", "trio", "boto3", "botocore", "obstore", "rocksdict", "msgspec", "click", "redis")
_SHOWN = frozenset(
    {
        "AWS_DEFAULT_REGION", "AWS_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE",
        "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_EC2_METADATA_DISABLED", "HTTP_PROXY", "HTTPS_PROXY",
        "NO_PROXY", "LANG", "LC_ALL", "TMPDIR", "XDG_CACHE_HOME", "XDG_STATE_HOME", f"{ENVIRONMENT_PREFIX}FUSE_HOOKS",
    }
)  # fmt: skip
"""Variables whose values are included."""
_NAMED = ("AWS_", ENVIRONMENT_PREFIX)
"""Prefixes of variables of which only the names are included."""


@dataclass(frozen=True)
class Contents:
    """What goes into a bundle."""

    results: list[CheckResult]
    statistics: Mapping[str, object]
    """Values of ``stats --json``; empty without a mount."""
    configuration: Mapping[str, object]
    """The settings of the store, and the options of the command."""
    log_file: str = ""
    """Of the daemon; rotated ones lie beside it."""

    @property
    def pid(self) -> int:
        """Of the daemon; 0 without one."""
        return int(number(self.statistics, "daemon", "pid"))


def write_bundle(path: Path, contents: Contents) -> None:
    """Write the ZIP. Raises LakeError where it exists, or cannot be written whole; then there is none."""
    environments = [dict(os.environ), *([environment_of(contents.pid)] if contents.pid else [])]
    redactor = Redactor(secret for each in environments for secret in secrets_of(each))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise LakeError(f"--bundle {path} exists: name another file") from error
    except OSError as error:
        raise LakeError(f"--bundle {path} cannot be written ({error.strerror}): name another file") from error
    try:
        with open(descriptor, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in _members(contents, environments[-1]):
                archive.writestr(name, redactor.redact(text))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise LakeError(f"--bundle {path} cannot be written ({error.strerror}): name another file") from error


def _members(contents: Contents, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "checks.json", _json(contents.results)
    yield "configuration.json", _json(contents.configuration)
    if contents.statistics:
        yield "stats.json", _json(contents.statistics)
    yield "machine.json", _json(_machine(environment))
    yield "mountinfo.txt", _mounts()
    if contents.log_file:
        log = Path(contents.log_file)
        for each in sorted(log.parent.glob(f"{log.name}*")):
            yield f"logs/{each.name}", _end_of(each)


def _machine(environment: Mapping[str, str]) -> dict[str, object]:
    names = sorted(name for name in environment if name.startswith(_NAMED) or name.upper() in _SHOWN)
    return {
        "version": __version__,
        "python": sys.version,
        "kernel": platform.release(),
        "system": platform.platform(),
        "packages": dict(_versions()),
        "environment": {name: environment[name] if name.upper() in _SHOWN else "(set)" for name in names},
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _mounts() -> str:
    """The FUSE mounts of this namespace."""
    lines = MOUNTINFO.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if " - fuse" in line) + "\n"


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES_MAX))
            return file.read().decode("utf-8", "replace")
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}\n"


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
