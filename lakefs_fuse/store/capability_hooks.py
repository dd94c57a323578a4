"""What a store may offer beyond `ObjectStore` for the probe to find out more, and to make use of it.

`probe` calls it before anything is served; `Unguarded` is for `client.StoreClient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from lakefs_fuse.store.protocol import Capabilities, ObjectMeta, PartRef


@runtime_checkable
class Observable(Protocol):
    """A store that can show what its server answers before it is made up for."""

    def observe_get(self, key: str, start: int, end: int, *, etag: str | None = None) -> tuple[int, int]:
        """HTTP status and body length of a ranged GET."""


@runtime_checkable
class Introducing(Protocol):
    """A store whose server says its name."""

    @property
    def server(self) -> str:
        """As in the last answer to GET (``Server``); empty where it says none."""


@runtime_checkable
class Conditional(Protocol):
    """A store whose server may honour conditions on changing an object. Each raises PreconditionFailed where the object
    is another version and the server looked."""

    @property
    def capabilities(self) -> Capabilities: ...
    def replace(self, key: str, body: bytes, etag: str) -> ObjectMeta: ...
    def complete_if_match(self, key: str, upload_id: str, parts: Sequence[PartRef], etag: str) -> None: ...
    def delete_if_match(self, key: str, etag: str) -> None: ...
    def page_keys_max(self) -> int:
        """Most keys that a page of a listing has."""


class Sender(Protocol):
    """What sends the bodies of uploads."""

    @property
    def sends_sums(self) -> bool:
        """Whether uploads carry their CRC-32."""

    def use_sums(self, enabled: bool) -> None:
        """Uploads carry their CRC-32 from now on, or do not."""

    @property
    def encrypted(self) -> bool:
        """Then sums are no use."""

    def accepts(self, key: str, body: bytes, crc32: int, upload_id: str = "") -> bool:
        """Whether the store takes an object, or part 1 of an upload, whose CRC-32 is said to be ``crc32``."""


@runtime_checkable
class Summing(Protocol):
    """A store whose uploads can say their sums."""

    @property
    def sender(self) -> Sender: ...


@runtime_checkable
class Adaptable(Protocol):
    """A store that behaves differently for different capabilities."""

    def adapt(self, capabilities: Capabilities) -> None:
        """Called once, before serving."""


@runtime_checkable
class Unguarded(Protocol):
    """A store whose answers may be damaged on the way, unless TLS guards them."""

    @property
    def is_guarded(self) -> bool: ...

    def has_md5_etag(self, key: str) -> bool:
        """False where the object is encrypted in a way that makes its ETag no MD5 sum, whatever the store makes of
        others. Raises NotFound."""
