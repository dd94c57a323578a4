"""The URL of `--hints`, checked before anything is mounted."""

from __future__ import annotations

import importlib.util
from urllib.parse import urlsplit

from lakefs_fuse.errors import ConfigError
from lakefs_fuse.product import PROGRAM


def check_hints(url: str) -> None:
    """Raises ConfigError for what is not redis://[USER@]HOST[:PORT][/DB] or rediss://…, and if redis-py is missing."""
    expected = "expected redis://HOST[:PORT][/DB], or rediss:// for TLS"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--hints: {expected}") from error
    if parts.password is not None:
        raise ConfigError(
            "--hints: every user of this machine can read a password in the URL: set LAKEFS_HINTS_PASSWORD, or "
            "LAKEFS_HINTS_PASSWORD_FILE to the name of a file that has it"
        )
    database = parts.path.strip("/")
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise ConfigError(f"--hints {url}: {expected}")
    if database and not (database.isascii() and database.isdigit()):
        raise ConfigError(f"--hints {url}: the database is a number: {expected}")
    if importlib.util.find_spec("redis") is None:
        raise ConfigError(f"--hints needs redis-py, which is not installed: pip install '{PROGRAM}[hints]'")
