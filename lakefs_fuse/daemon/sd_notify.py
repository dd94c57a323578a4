"""What systemd is told of a service of ``Type=notify``: sd_notify(3) in a dozen lines.

Without NOTIFY_SOCKET in the environment nothing is said. Never raises: a service manager that does not listen is no
reason not to mount.
"""

from __future__ import annotations

import os
import socket

VARIABLE = "NOTIFY_SOCKET"
SEND_S_MAX = 5.0

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(*assignments: str) -> None:
    """Say ``NAME=value`` lines; newlines in them become spaces."""
    address = os.environ.get(VARIABLE, "")
    if not address.startswith(("/", "@")):
        return
    message = "\n".join(assignment.replace("\n", " ") for assignment in assignments)
    if address.startswith("@"):  # a name in the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(SEND_S_MAX)
            connection.sendto(message.encode(errors="replace"), os.fsencode(address))
    except OSError:
        pass
