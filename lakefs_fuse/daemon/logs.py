"""The log of the daemon: one line per record, bounded in size, readable by its owner only. *No secrets* are in it.

The daemon calls `open_logs` once before anything else runs, its supervisor `open_supervisor_log`. A crash may lose the
records of other threads.
"""

from __future__ import annotations

import io
import logging
import logging.handlers
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from lakefs_fuse.config import MIB, MountConfig
from lakefs_fuse.environment.hint_channel import PASSWORD
from lakefs_fuse.errors import MountError

LOG_BYTES_MAX = 10 * MIB
LOG_FILES_KEPT = 3
REPEATED_S = 60.0
"""A line like the one before it is written again after this time."""
STDERR = 2

_SIGNED = re.compile(
    r"(X-Amz-(?:Signature|Credential|Security-Token)=)[^&\s'\"]+|(Authorization['\"]?: )[^\r\n]+", re.I
)
_SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", PASSWORD)
_ESCAPES: dict[int, str] = {
    **{code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0))},
    **{code: f"\\u{code:04x}" for code in (0x2028, 0x2029)},
    10: "\\n",
    13: "\\r",
    9: "\t",
}
"""Control characters, which a terminal obeys, and line ends."""


class PlainLine(logging.Formatter):
    """``time level logger: message``, in UTC. File names cannot forge a line; tracebacks follow on separate, indented
    lines."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        self._secrets = [value for name in _SECRET_VARIABLES if len(value := os.environ.get(name, "")) >= 8]

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        text = super().formatException(ei)
        return "\n".join("  " + line.translate(_ESCAPES) for line in text.split("\n"))

    def format(self, record: logging.LogRecord) -> str:
        """The line, with ``***`` instead of signatures and secrets from the environment."""
        text = _SIGNED.sub(lambda match: f"{match[1] or match[2]}***", super().format(record))
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text.encode("utf-8", "backslashreplace").decode()


class RepeatedLines(logging.Filter):
    """Drops lines that repeat the one before, for REPEATED_S, and writes their number before the next line. A program
    whose writes are refused causes a line for each of them."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler
        self._last, self._written_s, self._count = ("", 0, ""), 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        line = record.name, record.levelno, record.getMessage()
        with self._handler.lock or nullcontext():
            if line == self._last and record.created - self._written_s < REPEATED_S and not record.exc_info:
                self._count += 1
                return False
            if self._count:
                more = logging.makeLogRecord({**vars(record), "exc_info": None, "args": None})
                more.name, more.levelno, more.msg = *self._last[:2], f"the line before was repeated {self._count} times"
                more.levelname = logging.getLevelName(more.levelno)
                self._handler.emit(more)
            self._last, self._written_s, self._count = line, record.created, 0
        return True


class _PrivateFile(logging.FileHandler):
    """A log file that only its owner may read. If standard error is this file at first, it follows the rotation: the
    output of a crash is in the log, and not in a file that rotation has deleted."""

    _has_stderr: bool | None = None

    def _open(self) -> io.TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._has_stderr is None:
            self._has_stderr = _is_stderr(descriptor)
        elif self._has_stderr:
            os.dup2(descriptor, STDERR)
        return io.TextIOWrapper(io.FileIO(descriptor, "a"), encoding="utf-8", write_through=True)


def _is_stderr(descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.fstat(STDERR))
    except OSError:  # standard error is closed
        return False


class PrivateRotatingFile(_PrivateFile, logging.handlers.RotatingFileHandler):
    """A log that this process rotates; every file has mode 0600."""


class PrivateWatchedFile(_PrivateFile, logging.handlers.WatchedFileHandler):
    """A log that another process rotates: it is opened again after a rotation. If it cannot be opened, for example
    because its directory is missing, records are lost, and the next one tries again."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)


def open_logs(config: MountConfig, *, is_restart: bool = False) -> None:
    """Log to the log file, and in the foreground to standard error. A restarted daemon continues without a log file
    that cannot be opened. Raises MountError."""
    _open_root(
        config,
        lambda path: PrivateRotatingFile(path, maxBytes=LOG_BYTES_MAX, backupCount=LOG_FILES_KEPT, delay=False),
        is_required=not is_restart,
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(RepeatedLines(handler))
    # At DEBUG these log requests with their headers.
    for name in ("boto3", "botocore", "s3transfer", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)


def open_supervisor_log(config: MountConfig) -> None:
    """Log to the log file of the daemon, which rotates it. Raises MountError."""
    _open_root(config, PrivateWatchedFile)


def _open_root(config: MountConfig, open_file: Callable[[str], logging.Handler], *, is_required: bool = True) -> None:
    handlers: list[logging.Handler] = []
    if config.log_file is not None:
        try:
            Path(config.log_file).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handlers.append(open_file(config.log_file))
        except OSError as error:
            if is_required:
                raise MountError(f"log file {config.log_file} cannot be written to: {error.strerror}") from error
    if config.foreground or not handlers:
        handlers.append(logging.StreamHandler(sys.stderr))
    for handler in handlers:
        handler.setFormatter(PlainLine())
    logging.basicConfig(level=config.log_level, handlers=handlers, force=True)
