"""What Amazon S3 charges and allows.

Prices are those of `scripts/bench/prices.toml`: the list prices of S3 Standard in us-east-1, with their date. DELETE
and traffic within the region are free. The rates are from the AWS documentation ("Best practices design patterns:
optimizing Amazon S3 performance"): at least 3,500 PUT, COPY, POST and DELETE, and 5,500 GET and HEAD a second for each
partitioned prefix. It names no rate of LIST; here LIST counts as GET does.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

PUTS_S, GETS_S = 3500.0, 5500.0
"""For each partitioned prefix. S3 splits a prefix by itself while requests grow, within 30 to 60 minutes."""
STORAGE_GB_MONTH = 0.023
"""US$ for the first 50 TB, in GB of 2**30 bytes."""
GB = 1 << 30
MONTH_S = 30 * 86400.0
_SOURCE = tomllib.loads((Path(__file__).parents[1] / "bench" / "prices.toml").read_text())
NAME: str = _SOURCE["name"]
USD_PER_1000: dict[str, float] = _SOURCE["usd_per_1000"]


def usd(*, gets: float = 0.0, lists: float = 0.0, puts: float = 0.0) -> float:
    """Of so many requests."""
    price = USD_PER_1000
    return (gets * price["get"] + lists * price["list"] + puts * price["put"]) / 1000
