"""What a check of a machine, a store or a mount found: one line each, for `lakefs-fuse doctor`.

*No secrets*: a result holds no credential and no URL with a password. Its names and values are for scripts, and final
once released.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Severity(Enum):
    """How bad a result is."""

    OK = "ok"
    WARNING = "warning"
    """It works, and something costs, or may fail later."""
    FAILED = "failed"
    """It does not work, or bytes will be lost."""
    SKIPPED = "skipped"
    """It could not be checked, or was not to be."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="check_result"):
    """The result of one ``check``. ``text`` is one sentence, and says what to do unless all is well."""

    check: str
    severity: Severity
    text: str
    values: dict[str, object] = {}
    """Measured numbers, whose names end in their unit."""


def ok(check: str, text: str, **values: object) -> CheckResult:
    """All is well."""
    return CheckResult(check=check, severity=Severity.OK, text=text, values=values)


def warning(check: str, text: str, **values: object) -> CheckResult:
    """See `Severity.WARNING`."""
    return CheckResult(check=check, severity=Severity.WARNING, text=text, values=values)


def failed(check: str, text: str, **values: object) -> CheckResult:
    """See `Severity.FAILED`."""
    return CheckResult(check=check, severity=Severity.FAILED, text=text, values=values)


def skipped(check: str, text: str) -> CheckResult:
    """See `Severity.SKIPPED`."""
    return CheckResult(check=check, severity=Severity.SKIPPED, text=text)
