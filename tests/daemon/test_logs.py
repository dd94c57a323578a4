"""The daemon's log: one line per record, private, bounded, without secrets."""

from __future__ import annotations

import logging
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.daemon import logs
from lakefs_fuse.errors import MountError
from tests.control.fakes import mount_config

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@pytest.fixture
def log_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A log that is open as the daemon opens it; pytest's own handlers come back afterwards."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    path = tmp_path / "state" / "lake.log"
    logs.open_logs(msgspec.structs.replace(mount_config("/mnt/lake"), log_file=str(path), log_level="DEBUG"))
    yield path
    for handler in root.handlers[:]:
        if isinstance(handler, logs.PrivateRotatingFile):
            root.removeHandler(handler)
            handler.close()
    # `open_logs` took the place of these.
    root.handlers += [handler for handler in before if handler not in root.handlers]
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_file_name_cannot_forge_a_line(log_file: Path) -> None:
    logging.getLogger("lake").info("stored %s", "a\n2026-01-01T00:00:00.000Z ERROR root: forged\x1b[2J")
    lines = log_file.read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(r"INFO lake: stored a\n2026-01-01T00:00:00.000Z ERROR root: forged\x1b[2J")


def test_a_file_name_has_no_line_end_and_nothing_that_a_terminal_obeys(log_file: Path) -> None:
    logging.getLogger("lake").info("stored %s", "tab\tcsi\x9b2J nel\x85 del\x7f ls\u2028 ps\u2029 ü€")
    (line,) = log_file.read_text().splitlines()
    assert line.endswith("stored tab\tcsi\\x9b2J nel\\x85 del\\x7f ls\\u2028 ps\\u2029 ü€")


def test_a_file_name_in_an_exception_cannot_forge_a_line(log_file: Path) -> None:
    try:
        raise ValueError("a\n2026-01-01T00:00:00.000Z ERROR root: forged\x1b[2J")
    except ValueError:
        logging.getLogger("lake").exception("failed")
    first, *rest = log_file.read_text().splitlines()
    assert first.endswith("ERROR lake: failed")
    assert rest[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") for line in rest)
    assert "\x1b" not in "".join(rest)


def test_secrets_are_blotted_out_of_messages_and_tracebacks(log_file: Path) -> None:
    logger = logging.getLogger("lake")
    logger.info("GET http://s3/b?X-Amz-Credential=AKIA123&X-Amz-Signature=deadbeef&x=1")
    logger.info("headers {'Authorization': 'AWS4-HMAC-SHA256 Credential=AKIA123'}")
    try:
        raise ValueError(f"bad key {SECRET}")
    except ValueError:
        logger.exception("failed")
    text = log_file.read_text()
    assert SECRET not in text
    assert "AKIA123" not in text
    assert "deadbeef" not in text
    assert "x=1" in text
    assert "ValueError: bad key ***" in text


def test_the_libraries_that_log_headers_are_kept_quiet(log_file: Path) -> None:
    for name in ("botocore.auth", "urllib3.connectionpool", "boto3.resources"):
        logging.getLogger(name).debug("Authorization: secret")
    assert log_file.read_text() == ""


def test_the_log_is_private_and_bounded(log_file: Path) -> None:
    (handler,) = (each for each in logging.getLogger().handlers if isinstance(each, logs.PrivateRotatingFile))
    handler.maxBytes = 1000
    for number in range(200):
        logging.getLogger("lake").info("line %d", number)
    files = sorted(log_file.parent.iterdir())
    assert len(files) == 1 + logs.LOG_FILES_KEPT
    assert all(file.stat().st_size <= 1000 and stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert "line 199" in log_file.read_text()


@pytest.mark.parametrize("kind", ["PrivateRotatingFile", "PrivateWatchedFile"])
@pytest.mark.parametrize("is_log", [True, False])
def test_stderr_that_is_the_log_stays_so_when_that_is_rotated(tmp_path: Path, kind: str, is_log: bool) -> None:
    """In a process of its own, for its standard error."""
    program = """
import logging, os, sys
from lakefs_fuse.daemon import logs
path, kind = sys.argv[1:]
more = {"maxBytes": 100, "backupCount": logs.LOG_FILES_KEPT} if kind == "PrivateRotatingFile" else {}
handler = getattr(logs, kind)(path, **more)
logging.basicConfig(handlers=[handler])
for number in range(2 + logs.LOG_FILES_KEPT):
    if not more:
        os.rename(path, f"{path}.{number}")
    logging.error("x" * 80)
os.write(2, b"crashed")
"""
    log, other = tmp_path / "log", tmp_path / "other"
    with open(log if is_log else other, "ab") as stderr:
        subprocess.run([sys.executable, "-c", program, log, kind], stderr=stderr, check=True)
    assert log.read_bytes().endswith(b"crashed") == is_log
    assert other.exists() == (not is_log)


def test_restarted_daemon_goes_on_without_a_log_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    config = msgspec.structs.replace(mount_config("/mnt/lake"), log_file=str(tmp_path / "log"))
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        with pytest.raises(MountError, match="cannot be written to"):
            logs.open_logs(config)
        logs.open_logs(config, is_restart=True)
        assert [type(handler) for handler in root.handlers] == [logging.StreamHandler]
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def test_line_that_is_repeated_is_counted(log_file: Path) -> None:
    log = logging.getLogger("repeated")
    for _ in range(100):
        log.warning("write: %s", "no room")
    log.error("write: %s", "no room")
    log.error("flush: no room")
    assert [line.split(" ", 1)[1] for line in log_file.read_text().splitlines()] == [
        "WARNING repeated: write: no room",
        "WARNING repeated: the line before was repeated 99 times",
        "ERROR repeated: write: no room",
        "ERROR repeated: flush: no room",
    ]


def test_line_that_is_repeated_later_is_written_again(log_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "REPEATED_S", 0.0)
    for _ in range(3):
        logging.getLogger("repeated").warning("once a minute")
    assert log_file.read_text().count("once a minute") == 3
