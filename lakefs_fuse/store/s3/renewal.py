"""Renewal of credentials that end: of roles, of machines and pods, and of `credential_process`.

botocore asks for new ones at each request from 15 minutes before their end. Those of a session of 15 minutes, the
shortest that STS gives, and those that a program or an agent keeps until shortly before their end, are then asked for
at each request: a process that takes a second is run a thousand times. And from 10 minutes before their end a request
fails if there are no new ones.

What always holds: new ones are asked for once in `RENEW_S`, from `AHEAD_S` before the end; until `LAST_S` before it,
requests continue with the present ones while that fails. Called from any thread: botocore's lock is held.
"""

from __future__ import annotations

import math
from typing import Any

from botocore.credentials import RefreshableCredentials

from lakefs_fuse.environment.clock import Clock

AHEAD_S = 300.0
"""Machines and pods get new credentials at least 5 minutes before the end of the present ones. obstore asks again this
long before the end, too."""
RENEW_S = 10.0
"""A process may take a second of CPU."""
LAST_S = 60.0
"""New ones are asked for at each request from here on; a request may take some seconds until its signature is read."""


def limit_renewals(credentials: Any, clock: Clock) -> None:
    """Change botocore's credentials, if they end, so that they are renewed as the module's head says."""
    if not isinstance(credentials, RefreshableCredentials):
        return
    fetch, ends_within = credentials._refresh_using, credentials.refresh_needed
    asked_s = -math.inf

    def refresh() -> Any:
        nonlocal asked_s
        asked_s = clock.mono_s()
        return fetch()

    def refresh_needed(refresh_in: float | None = None) -> bool:
        is_needed: bool = ends_within(refresh_in)
        return is_needed and (clock.mono_s() - asked_s >= RENEW_S or ends_within(LAST_S))

    credentials._refresh_using, credentials.refresh_needed = refresh, refresh_needed
    credentials._advisory_refresh_timeout = min(AHEAD_S, credentials._advisory_refresh_timeout)
    credentials._mandatory_refresh_timeout = min(LAST_S, credentials._mandatory_refresh_timeout)
