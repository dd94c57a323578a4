"""Publishes files at an interval while they are being written, if the mount or a rule says so.

Other nodes read logs and event files while these grow. The files are opened for direct I/O, because the kernel would
keep written bytes for up to half a minute.

What always holds (*a prefix*): only bytes that were written one after another are published, from the start or from the
end of the version before. A file with a hole is published by its last close; one with a refused write, once the range
was written again.

Trio thread only; one task for each file that is watched. A crash leaves what the journal has.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from lakefs_fuse.errors import LakeError
from lakefs_fuse.path_rules import Rules
from lakefs_fuse.vfs.files.open_file import OpenFile

log = logging.getLogger(__name__)


class OpenFilePublisher:
    """Publishes open files; see the module's head."""

    def __init__(self, rules: Rules, publish: Callable[[OpenFile], Awaitable[None]], nursery: trio.Nursery) -> None:
        self._rules, self._publish, self._nursery = rules, publish, nursery

    def watch(self, file: OpenFile) -> bool:
        """Begin to publish a file that was opened for writing, if that is asked for; return whether it is."""
        interval_s = self._rules.publish_s(file.key) if self._rules.publishes_open_files else 0.0
        if interval_s > 0 and file.prefix_bytes is None:
            file.prefix_bytes = file.current.size
            self._nursery.start_soon(self._run, file, interval_s)
        return interval_s > 0

    async def _run(self, file: OpenFile, interval_s: float) -> None:
        is_failing = False
        try:
            while file.writers:
                await trio.sleep(interval_s)
                has_hole = file.current.size > (file.prefix_bytes or 0)
                if file.writers == 0 or file.draft is None or file.unlinked or has_hole:
                    continue
                try:
                    await self._publish(file)
                    is_failing = False
                except LakeError as error:
                    if not is_failing:
                        log.warning("%s is not stored while it is being written: %s", file.key, error)
                    is_failing = True
        finally:
            file.prefix_bytes = None
