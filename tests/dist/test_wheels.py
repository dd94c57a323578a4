"""Steps of `make dist` that need no build."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from scripts.dist.wheels import unpack


def test_source_distribution_is_unpacked_by_a_python_without_filters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of Debian 12 is."""
    sdist, directory = tmp_path / "lakefs_fuse-0.1.0.tar.gz", tmp_path / "unpacked"
    (tmp_path / "setup.py").write_text("pass\n")
    directory.mkdir()
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tmp_path / "setup.py", "lakefs_fuse-0.1.0/setup.py")
    extract = tarfile.TarFile.extractall

    def extract_all(archive: tarfile.TarFile, path: str = ".") -> None:
        extract(archive, path)

    monkeypatch.setattr(tarfile.TarFile, "extractall", extract_all)
    source = unpack(sdist, directory)
    assert (source.name, (source / "setup.py").read_text()) == ("lakefs_fuse-0.1.0", "pass\n")
