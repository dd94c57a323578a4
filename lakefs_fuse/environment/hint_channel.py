"""The channel of hints of commits: Redis, one channel of its publish/subscribe for each lake.

The password comes from the environment, `LAKEFS_HINTS_PASSWORD`, or from the file that `LAKEFS_HINTS_PASSWORD_FILE`
names: a command line is for all to read. redis-py is an optional dependency, the extra ``hints``.

What always holds (*one error*): whatever goes wrong is an OSError, and the next `connect` begins anew. Blocking; calls
of `publish` in one thread, all others in another.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from lakefs_fuse.errors import ConfigError
from lakefs_fuse.product import ENVIRONMENT_PREFIX, PROGRAM

PASSWORD, PASSWORD_FILE = f"{ENVIRONMENT_PREFIX}HINTS_PASSWORD", f"{ENVIRONMENT_PREFIX}HINTS_PASSWORD_FILE"
PORT = 6379
TIMEOUT_S = 3.0
"""Of a connection, and of an answer."""


def read_password(environment: Mapping[str, str]) -> str | None:
    """Raises ConfigError where the file cannot be read."""
    if name := environment.get(PASSWORD_FILE):
        try:
            with open(name, encoding="utf-8") as file:
                return file.read().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{PASSWORD_FILE}={name} cannot be read: name a file that you may read") from error
    return environment.get(PASSWORD) or None


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of redis-py, whatever kind, for an answer that it does not expect as well
        raise OSError(f"{type(error).__name__}: {error}") from error


class HintChannel(Protocol):
    """Messages to all who listen; blocking calls, each from one thread at a time. They raise OSError when the channel
    is lost."""

    def connect(self) -> None:
        """Listen; what was published before is not heard."""

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message; an empty one is a sign of life; None after that time."""

    def ping(self) -> None:
        """Ask for a sign of life."""

    def publish(self, message: bytes) -> None:
        """Send a message to all who listen."""

    def close(self) -> None:
        """Give the connections up."""


class RedisChannel:
    """A `HintChannel`; see the module's head."""

    def __init__(self, url: str, lake: str, password: str | None) -> None:
        """``lake`` is the lake's id."""
        parts = urlsplit(url)
        self._options: dict[str, Any] = {
            "host": parts.hostname,
            "port": parts.port or PORT,
            "db": int(parts.path.strip("/") or 0),
            "ssl": parts.scheme == "rediss",
            "username": unquote(parts.username) if parts.username else None,
            "password": password,
            "socket_connect_timeout": TIMEOUT_S,
            "socket_timeout": TIMEOUT_S,
            "retry": None,
        }
        self._channel = f"{PROGRAM}/{lake}/commits"
        self._publisher: Any = None
        self._listener: Any = None

    def _client(self) -> Any:
        import redis

        return redis.Redis(**self._options)

    def connect(self) -> None:
        """See `HintChannel.connect`."""
        with _translated():
            self.close()
            self._listener = self._client().pubsub()
            self._listener.subscribe(self._channel)
            answer = self._listener.get_message(timeout=TIMEOUT_S)
        if answer is None or answer["type"] != "subscribe":
            raise OSError("Redis does not answer SUBSCRIBE")

    def receive(self, timeout_s: float) -> bytes | None:
        """See `HintChannel.receive`."""
        with _translated():
            message = self._listener.get_message(timeout=timeout_s)
        if message is None:
            return None
        data = message["data"]
        return data if message["type"] == "message" and isinstance(data, bytes) else b""

    def ping(self) -> None:
        """See `HintChannel.ping`."""
        with _translated():
            self._listener.ping()

    def publish(self, message: bytes) -> None:
        """See `HintChannel.publish`."""
        with _translated():
            if self._publisher is None:
                self._publisher = self._client()
            self._publisher.publish(self._channel, message)

    def close(self) -> None:
        """See `HintChannel.close`. What listens is given up; what publishes connects anew by itself."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError), _translated():
                listener.close()


def open_channel(url: str, lake: str) -> RedisChannel:
    """The channel of a lake. Raises ConfigError where there is no password to read."""
    return RedisChannel(url, lake, read_password(os.environ))
