"""Lakes mounted by the real program, as the tests of mounts have them."""

from __future__ import annotations

from tests.mount.conftest import dev_fuse, make_lake

__all__ = ["dev_fuse", "make_lake"]
