"""Removes secrets from texts that leave the machine.

*No secrets*: known ones (of the environment of this process and of a daemon, of the AWS files, of the password files
that variables name) are replaced everywhere, also in the encodings of URLs and JSON. Unknown ones are replaced if their
form identifies them: passwords in URLs, signatures, access keys of AWS.
"""

from __future__ import annotations

import configparser
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

SECRET_CHARS_MIN = 4
"""Shorter values occur in ordinary words, and are not used as secrets."""
REPLACEMENT = "***"

_SECRET_NAME = re.compile(
    r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|ACCESS_KEY|API_?KEY|PRIVATE_KEY|_AUTH$", re.IGNORECASE
)
_NOT_SECRET = re.compile(r"_FILE$|_URI$|_DISABLED$", re.IGNORECASE)
"""Variables whose value says where a secret is."""
_FORMS = (
    (re.compile(r"(://)[^/\s'\"<>]*@"), rf"\1{REPLACEMENT}@"),
    (
        re.compile(r"((?:X-Amz-)?(?:Signature|Credential|Security-Token)=)[^&\s'\",]+", re.IGNORECASE),
        rf"\1{REPLACEMENT}",
    ),
    (re.compile(r"((?:Proxy-)?Authorization['\"]?\s*[:=]\s*)[^\r\n]+", re.IGNORECASE), rf"\1{REPLACEMENT}"),
    (re.compile(r"\b(?:AKIA|ASIA|AROA)[A-Z0-9]{12,}\b"), REPLACEMENT),
)


class Redactor:
    """Replaces secrets in texts."""

    def __init__(self, secrets: Iterable[str]) -> None:
        found = {form for secret in secrets if len(secret) >= SECRET_CHARS_MIN for form in _forms_of(secret)}
        # The longest first, because others may be parts of it.
        self._secrets = sorted(found, key=len, reverse=True)

    def redact(self, text: str) -> str:
        """``text`` without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, REPLACEMENT)
        for pattern, replacement in _FORMS:
            text = pattern.sub(replacement, text)
        return text


def _forms_of(secret: str) -> set[str]:
    return {secret, unquote(secret), quote(secret, safe=""), quote(secret), json.dumps(secret)[1:-1]}


def secrets_of(environment: Mapping[str, str]) -> Iterator[str]:
    """Secrets of an environment, and of the files that it names: values of variables with telling names, passwords in
    URLs, every credential of ~/.aws."""
    for name, value in environment.items():
        if _SECRET_NAME.search(name) and not _NOT_SECRET.search(name):
            yield value
        if "://" in value:
            yield from _password_of(value)
        if _SECRET_NAME.search(name) and name.endswith("_FILE") and not name.startswith("AWS_"):
            yield _contents(Path(value)).strip()
    home = Path(environment.get("HOME") or "~").expanduser()
    for variable, usual in (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config")):
        yield from _secrets_of_profile_file(Path(environment.get(variable) or home / ".aws" / usual).expanduser())


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty where it is not ours to read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(each).partition("=") for each in raw.split(b"\0") if each)
    return {name: value for name, _, value in pairs}


def _password_of(url: str) -> Iterator[str]:
    try:
        password = urlsplit(url).password
    except ValueError:
        return
    if password:
        yield password


def _contents(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _secrets_of_profile_file(path: Path) -> Iterator[str]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(_contents(path))
    except configparser.Error:
        return
    for section in parser.sections():
        yield from (value for name, value in parser.items(section) if _SECRET_NAME.search(name))
