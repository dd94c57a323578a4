"""The mounted session of this process: from mount(2) until the kernel ends it.

`Session.serve` runs the request loop and the invalidations beside it. Unmounting goes through the kernel (fusermount3
or umount), never around it: the kernel then writes back dirty pages while the loop that receives them still runs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial

from lakefs_fuse.product import FILESYSTEM

from lakefs_fuse.kernel.native import hooks  # isort: skip  (loaded before pyfuse3, which it wraps)
import pyfuse3
import trio
from msgspec import structs

from lakefs_fuse.config import MountConfig
from lakefs_fuse.errors import MountError
from lakefs_fuse.kernel import request_loop
from lakefs_fuse.kernel.features import KernelFeatures, background_max, features_for, raise_read_ahead
from lakefs_fuse.kernel.immutable_operations import ImmutableOperations
from lakefs_fuse.kernel.operations import Operations
from lakefs_fuse.vfs.filesystem import Filesystem
from lakefs_fuse.vfs.immutable.filesystem import ImmutableFilesystem

TASKS_MAX = 1024
"""Maximum of concurrent requests. Each may be waiting for the store, while the kernel queues the following ones. A busy
task has a buffer of 1 MiB, of which only the part used by its request takes memory."""
log = logging.getLogger(__name__)


class _Utf8Option(str):
    """An option of the mount with any character: pyfuse3 encodes options as ASCII, and the kernel takes bytes."""

    def encode(self, encoding: str = "utf-8", errors: str = "surrogateescape") -> bytes:
        return super().encode("utf-8", "surrogateescape")


def _options(config: MountConfig) -> set[str]:
    source = str(config.store.source).replace("\\", "\\\\").replace(",", "\\,")
    options = set(pyfuse3.default_options) | {_Utf8Option(f"fsname={source}"), f"subtype={FILESYSTEM}"}
    if config.allow_other:
        options.add("allow_other")
    if config.read_only:
        options.add("ro")
    return options


class Session:
    """The FUSE session of a process, served once: libfuse's state is global, too."""

    def __init__(self, device_at: Callable[[str], str], unmount: Callable[[str, str], None]) -> None:
        """``device_at`` and ``unmount`` are those of `control.mounts`."""
        self._device_at, self._unmount = device_at, unmount
        self._unmount_requested: trio.Event | None = None
        """Set while the session is served."""

    def request_unmount(self) -> None:
        """Make `serve` unmount and return; trio thread only. While nothing is served it does nothing."""
        if self._unmount_requested is not None:
            self._unmount_requested.set()

    async def serve(
        self, fs: Filesystem | ImmutableFilesystem, config: MountConfig, *, ready: Callable[[], None]
    ) -> None:
        """Mount, call ``ready`` when the mount answers, return when it is unmounted. Raises MountError, and LakeError
        where a requested unmount fails."""
        self._unmount_requested = trio.Event()
        try:
            await self._serve(fs, config, ready, self._unmount_requested)
        finally:
            self._unmount_requested = None

    async def _serve(
        self,
        fs: Filesystem | ImmutableFilesystem,
        config: MountConfig,
        ready: Callable[[], None],
        unmount_requested: trio.Event,
    ) -> None:
        config = structs.replace(config, read_only=fs.config.read_only)  # the store may refuse writes
        kernel = KernelFeatures(features_for(config), not config.read_only, background_max(config))
        operations = ImmutableOperations(fs, kernel) if isinstance(fs, ImmutableFilesystem) else Operations(fs, kernel)
        hooks.request_features(kernel.wanted, kernel.background_max)
        try:
            pyfuse3.init(operations, config.mountpoint, _options(config))
        except (RuntimeError, OSError, UnicodeEncodeError) as error:
            raise MountError(
                f"cannot mount on {config.mountpoint}: {error} (is /dev/fuse there, and may you use it?)"
            ) from error
        log.info(
            "mounted %s on %s, hooks %s", config.store.source, config.mountpoint, "on" if hooks.active() else "off"
        )
        end_mount = partial(self._unmount, config.mountpoint, self._device_at(config.mountpoint))
        unmount = True

        def answers() -> None:
            nonlocal unmount
            # If this fails from here on, the dead mount stays for the next daemon to replace: until then programs get
            # errors, and do not see the underlying directory.
            unmount = not config.supervise
            ready()

        try:
            async with trio.open_nursery() as nursery:
                background = (
                    operations.invalidations if isinstance(operations, Operations) else operations.page_cache_push
                )
                nursery.start_soon(background.run)
                nursery.start_soon(operations.requests.run)
                nursery.start_soon(_report_ready, config.mountpoint, kernel, answers)
                nursery.start_soon(_unmount_on_request, end_mount, unmount_requested)
                if request_loop.begin(operations.waiting) and isinstance(operations, Operations):
                    operations.create_offload.begin()
                await serve_requests()
                unmount = False
                nursery.cancel_scope.cancel()
        except BaseException:
            unmount = unmount or unmount_requested.is_set()
            raise
        finally:
            if isinstance(operations, Operations):
                operations.create_offload.end()
            pyfuse3.close(unmount=unmount)


async def serve_requests() -> None:
    """Serve requests until the mount is gone.

    If the kernel unmounts just as a request is read, the read fails with ECONNABORTED, and not with ENODEV, which alone
    ends the loop of pyfuse3 without an error."""
    try:
        await pyfuse3.main(min_tasks=4, max_tasks=TASKS_MAX)
    except* ConnectionAbortedError as error:
        log.info("the connection to the kernel ended while a request was read: %s", error.exceptions)


async def _report_ready(mountpoint: str, kernel: KernelFeatures, ready: Callable[[], None]) -> None:
    """Raise the readahead and call ``ready``, once the mount has answered a system call."""

    def prepare() -> tuple[int, str]:
        os.statvfs(mountpoint)
        return raise_read_ahead(mountpoint)

    kernel.read_ahead_kib, note = await trio.to_thread.run_sync(prepare, abandon_on_cancel=True)
    kernel.notes += [note] if note else []
    log.info("%s", kernel.line())
    ready()


async def _unmount_on_request(unmount: Callable[[], None], requested: trio.Event) -> None:
    """The request loop ends when the kernel has unmounted: for a mount in use, when its last file is closed."""
    await requested.wait()
    await trio.to_thread.run_sync(unmount, abandon_on_cancel=True)
