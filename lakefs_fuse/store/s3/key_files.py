"""Access keys in ~/.aws/credentials and ~/.aws/config, read again while they are used, so that rotation needs no mount.

botocore reads these files once. What always holds: a request is signed with one pair that stood in the file at most
`REREAD_S` before; while the file cannot be read, or has no keys, those found before stay in use. Keys are never
formatted. Called from any thread.
"""

from __future__ import annotations

import logging
from typing import Any

from botocore.credentials import CredentialResolver, Credentials

from lakefs_fuse.environment.clock import Clock

REREAD_S = 10.0
"""A third of a millisecond of CPU each time; old keys stay valid for longer during a rotation."""
FILE_METHODS = ("shared-credentials-file", "config-file")
"""botocore's providers that read access keys from a file."""
log = logging.getLogger(__name__)


class FileCredentials(Credentials):  # type: ignore[misc]
    """What ``provider`` found in its file, and finds there later."""

    def __init__(self, provider: Any, found: Any, clock: Clock) -> None:
        super().__init__(found.access_key, found.secret_key, found.token, found.method, found.account_id)
        self._provider, self._clock = provider, clock
        self._frozen, self._read_s = found.get_frozen_credentials(), clock.mono_s()

    def get_frozen_credentials(self) -> Any:
        """A key with its secret and its token, as of the last look at the file."""
        now_s = self._clock.mono_s()
        if now_s - self._read_s >= REREAD_S:
            self._read_s = now_s
            self._read()
        return self._frozen

    def _read(self) -> None:
        try:
            found = self._provider.load()
        except Exception as error:  # of any kind that a file which is being edited leads to
            log.warning(
                "the file of the access keys cannot be read (%s): using those read before", type(error).__name__
            )
            return
        if found is not None and (frozen := found.get_frozen_credentials()) != self._frozen:
            self._frozen = frozen
            log.info("the access keys have changed (%s)", self.method)


class _FileProvider:
    """A provider of botocore's chain whose credentials are `FileCredentials`."""

    def __init__(self, provider: Any, clock: Clock) -> None:
        self._provider, self._clock = provider, clock
        self.METHOD, self.CANONICAL_NAME = provider.METHOD, provider.CANONICAL_NAME

    def load(self) -> FileCredentials | None:
        found = self._provider.load()
        return None if found is None else FileCredentials(self._provider, found, self._clock)


def follow_files(chain: CredentialResolver, clock: Clock) -> None:
    """Make the providers of botocore's ``chain`` that read keys from files give keys that follow the files."""
    chain.providers = [_FileProvider(each, clock) if each.METHOD in FILE_METHODS else each for each in chain.providers]
