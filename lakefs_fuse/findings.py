"""What a check of a machine, a store or a mount found: one line each, for `lakefs-fuse doctor`.

*No secrets*: a finding holds no credential and no URL with a password. Its names and values are for scripts, and final
once released.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Severity(Enum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """It works, and something costs, or may fail later."""
    FAILED = "failed"
    """It does not work, or bytes will be lost."""
    SKIPPED = "skipped"
    """It could not be checked, or was not to be."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="finding"):
    """The result of one ``check``. ``text`` is one sentence, and says what to do unless all is well."""

    check: str
    severity: Severity
    text: str
    values: dict[str, object] = {}
    """Measured numbers, whose names end in their unit."""


def ok(check: str, text: str, **values: object) -> Finding:
    """All is well."""
    return Finding(check=check, severity=Severity.OK, text=text, values=values)


def warning(check: str, text: str, **values: object) -> Finding:
    """See `Severity.WARNING`."""
    return Finding(check=check, severity=Severity.WARNING, text=text, values=values)


def failed(check: str, text: str, **values: object) -> Finding:
    """See `Severity.FAILED`."""
    return Finding(check=check, severity=Severity.FAILED, text=text, values=values)


def skipped(check: str, text: str) -> Finding:
    """See `Severity.SKIPPED`."""
    return Finding(check=check, severity=Severity.SKIPPED, text=text)
