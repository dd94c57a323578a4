"""HTTP sessions of botocore whose connections share one SSL context, which reads the trusted certificates once.

urllib3 reads the file of certificates into the context whenever it connects: 45 ms of CPU for the file that comes with
botocore, of which a mount that uploads opens dozens of connections.

What always holds: certificates are verified as botocore has it; a file that was replaced since is read by the next
connection. Sessions may be used from any thread.
"""

from __future__ import annotations

import os
from ssl import SSLContext
from typing import Any

from botocore.httpsession import URLLib3Session, create_urllib3_context


class HttpSession(URLLib3Session):  # type: ignore[misc]
    """A session of botocore; ``context`` is from `shared_context`."""

    def __init__(self, context: SSLContext, **options: Any) -> None:
        self._shared_context = context
        super().__init__(**options)

    def _get_ssl_context(self) -> SSLContext:
        """Overrides botocore's, which makes one for each session."""
        return self._shared_context


def shared_context() -> SSLContext:
    """botocore's SSL context, which reads a file of certificates only if it has not read that version of the file."""
    context: SSLContext = create_urllib3_context()
    load, loaded = context.load_verify_locations, set[tuple[str, int, int]]()

    def load_once(cafile: str, *_: None) -> None:
        about = os.stat(cafile)
        version = cafile, about.st_ino, about.st_mtime_ns
        if version not in loaded:
            load(cafile)
            loaded.add(version)

    context.load_verify_locations = load_once  # type: ignore[method-assign, assignment]
    return context
