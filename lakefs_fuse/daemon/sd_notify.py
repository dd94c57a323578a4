"""Notifies systemd of the state of a ``Type=notify`` service, as sd_notify(3) does.

Without NOTIFY_SOCKET in the environment nothing is sent. Never raises: a mount does not depend on a service manager.
"""

from __future__ import annotations

import os
import socket

VARIABLE = "NOTIFY_SOCKET"
SEND_S_MAX = 5.0

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(*assignments: str) -> None:
    """Send ``NAME=value`` lines; newlines in them become spaces."""
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
