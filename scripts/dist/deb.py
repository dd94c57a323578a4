"""A Debian package of this program with all that it needs of PyPI, for the release that builds it.

Everything lies in a virtual environment of the system's Python, in PREFIX; `lakefs-fuse` and `mount.lakefs` are links
into it, so `mount -t lakefs` and /etc/fstab work. The Python packages contain code for one minor version of Python, and
pyfuse3 is linked with one libfuse: the package depends on both, and apt refuses it on another release.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from scripts.dist.wheels import only, run

SYSTEM_PYTHON = "/usr/bin/python3"
PREFIX = Path("opt/lakefs-fuse")
ROOT = Path(__file__).parents[2]
LINKS = {"usr/bin/lakefs-fuse": "lakefs-fuse", "usr/sbin/mount.lakefs": "mount.lakefs"}
"""mount(8) looks in /sbin, which is /usr/sbin in every release with a Python of 3.11."""
KEPT = {"pyvenv.cfg", "python", "python3", *LINKS.values()}
"""Of the files at the top of the virtual environment, and of its programs."""
COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/lakefs-fuse",
    "zsh": "usr/share/zsh/vendor-completions/_lakefs-fuse",
    "fish": "usr/share/fish/vendor_completions.d/lakefs-fuse.fish",
}
CONTROL = """Package: lakefs-fuse
Version: {version}
Architecture: {architecture}
Maintainer: lakefs-fuse developers <lakefs-fuse@localhost>
Installed-Size: {kib}
Depends: fuse3, {libfuse}, python3 (>= {python}~), python3 (<< {python_next}~)
Recommends: ca-certificates
Section: utils
Priority: optional
Description: data lake in an S3-compatible object store, mounted as a directory
 A FUSE filesystem for training jobs: they read data sets from a bucket and
 write checkpoints to it as files. Not affiliated with treeverse's lakeFS.
"""
COPYRIGHT = """lakefs-fuse is licensed under the Apache License 2.0: see /usr/share/common-licenses/Apache-2.0.

The Python packages in /{prefix} have licences of their own: see the *.dist-info directories beside them. One of
them, pyfuse3, is under the GNU LGPL 2.1 or later; {source} beside this file is its source.
"""


def build_deb(wheels: Mapping[str, Path], out: Path) -> Path:
    """Build the package of this machine's architecture and release from a wheel, and from that of pyfuse3 beside it.

    Raises CalledProcessError where a tool fails, and ValueError where the program cannot use what was built.
    """
    os.umask(0o022)
    version = wheels[platform.machine()].name.split("-")[1]
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        install_program(root, version, out)
        add_manual(root)
        add_completions(root)
        add_documents(root, only(out, "pyfuse3-*.tar.gz"))
        for link, target in LINKS.items():
            add_link(root / link, f"/{PREFIX}/bin/{target}")
        return pack(root, version, out)


def install_program(root: Path, version: str, out: Path) -> None:
    """Make the virtual environment; its scripts find Python beside them, wherever it lies."""
    prefix = root / PREFIX
    run(sys.executable, "-m", "uv", "venv", "--quiet", "--relocatable", "--python", SYSTEM_PYTHON, prefix)
    run(
        sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", prefix / "bin" / "python",
        "--find-links", out, f"lakefs-fuse=={version}",
    )  # fmt: skip
    for path in [*prefix.glob("*"), *(prefix / "bin").glob("*")]:
        if path.is_file() and path.name not in KEPT:
            path.unlink()
    site_packages = only(prefix / "lib", "python3.*/site-packages")
    run(SYSTEM_PYTHON, "-m", "compileall", "-q", "-j", "0", "-s", root, "-p", "/", site_packages)


def libfuse_of(root: Path) -> str:
    """File name of the libfuse that the installed program uses. Raises ValueError where a fast path does not work."""
    found = json.loads(run(root / PREFIX / "bin" / "python", "-P", "-m", "lakefs_fuse.kernel.installation"))
    broken = {name: why for name, why in found["fast_paths"].items() if why}
    if broken:
        raise ValueError(f"the program that was packaged lacks fast paths: {broken}")
    return str(found["file"])


def add_manual(root: Path) -> None:
    """Move the pages of the wheel to where Debian has them, compressed."""
    installed = root / PREFIX / "share" / "man"
    for page in installed.rglob("*.[18]"):
        target = root / "usr" / "share" / "man" / page.relative_to(installed)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.with_name(f"{page.name}.gz").write_bytes(gzip.compress(page.read_bytes(), mtime=0))
    shutil.rmtree(root / PREFIX / "share")


def add_completions(root: Path) -> None:
    """What click makes for each shell."""
    for shell, place in COMPLETIONS.items():
        path = root / place
        path.parent.mkdir(parents=True)
        script = run(
            root / PREFIX / "bin" / "lakefs-fuse", environment={"_LAKEFS_FUSE_COMPLETE": f"{shell}_source"}
        )  # fmt: skip
        path.write_text(script)


def add_documents(root: Path, pyfuse3_source: Path) -> None:
    """README, changes, licence, and the source of pyfuse3."""
    documents = root / "usr" / "share" / "doc" / "lakefs-fuse"
    documents.mkdir(parents=True)
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, documents)
    shutil.copy(pyfuse3_source, documents)
    (documents / "copyright").write_text(COPYRIGHT.format(prefix=PREFIX, source=pyfuse3_source.name))


def add_link(path: Path, target: str) -> None:
    """Make a symbolic link, and the directory that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def debian_version(version: str) -> str:
    """The same for dpkg, which sorts 1.0~~dev3 before 1.0~rc1, and that before 1.0."""
    return re.sub(r"(?<=\d)(a|b|rc)(?=\d)", r"~\1", version).replace(".dev", "~~dev")


def pack(root: Path, version: str, out: Path) -> Path:
    """Write the metadata of the package, and the package."""
    architecture = run("dpkg", "--print-architecture").strip()
    major, minor = run(SYSTEM_PYTHON, "-c", "import sys; print(*sys.version_info[:2])").split()
    owner = run("dpkg-query", "--search", f"*/{libfuse_of(root)}")
    control = CONTROL.format(
        version=debian_version(version),
        architecture=architecture,
        kib=sum(path.lstat().st_size for path in root.rglob("*")) // 1024,
        libfuse=owner.partition(":")[0],
        python=f"{major}.{minor}",
        python_next=f"{major}.{int(minor) + 1}",
    )
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN" / "control").write_text(control)
    package = out / f"lakefs-fuse_{debian_version(version)}_{architecture}.deb"
    run("dpkg-deb", "--root-owner-group", "-Zzstd", "--build", root, package)
    return package
