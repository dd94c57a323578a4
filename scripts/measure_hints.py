"""How soon a file that is closed on one node is seen by another that asked for it before.

    python -m scripts.measure_hints [--files 200] [--delay-ms 15] [--refresh 5s] [--no-hints]

SeaweedFS behind HAProxy, which delays each request; two mounts of this machine, and Redis. Prints percentiles in ms,
from `close` on one node until `stat` answers on the other, and then the bytes are read.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.mount.lakes import Lake, s3_lake
from tests.mount.test_commits import another
from tests.servers import free_port, latency, make_bucket, redis_server, seaweedfs

WAIT_S_MAX = 60.0
BUCKET = "hints"


def seen_after_s(lake: Lake, other: Lake, name: str) -> float:
    """From the end of `close` to when the other mount reads the bytes."""
    path = lake.path / name
    assert not path.exists()
    (other.path / name).write_bytes(b"weights")
    began_s = time.monotonic()
    while time.monotonic() - began_s < WAIT_S_MAX:
        if path.exists():
            assert path.read_bytes() == b"weights"
            return time.monotonic() - began_s
        time.sleep(0.002)
    raise RuntimeError(f"{name} is not seen within {WAIT_S_MAX:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--delay-ms", type=int, default=15)
    parser.add_argument("--refresh", default="5s")
    parser.add_argument("--no-hints", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(seaweedfs(root / "seaweed"))
        make_bucket(server, BUCKET)
        slow = stack.enter_context(latency(server, root / "haproxy", options.delay_ms))
        hints: list[str] = []
        if not options.no_hints:
            port = free_port()
            stack.enter_context(redis_server(root / "redis", port))
            hints = ["--hints", f"redis://127.0.0.1:{port}"]
        arguments = ("--metadata-ttl", "1h", "--refresh", options.refresh, *hints)
        lake = stack.enter_context(s3_lake(server, BUCKET, root / "lake", *arguments, through=slow)).mount()
        other = stack.enter_context(another(lake, root))
        time.sleep(2.0)
        seen_ms = []
        for number in range(options.files):
            seen_ms.append(1000 * seen_after_s(lake, other, str(number)))
            time.sleep(random.uniform(0.2, 2.0))
        seen_ms.sort()
        shown = {name: seen_ms[min(len(seen_ms) - 1, int(len(seen_ms) * part))] for name, part in
                 {"p50": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}.items()}  # fmt: skip
        print(", ".join(f"{name} {value:.0f} ms" for name, value in shown.items()), f"of {len(seen_ms)} files")


if __name__ == "__main__":
    main()
