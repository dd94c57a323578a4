"""What `make dist` builds installs where only Python and libfuse are, without a compiler, and mounts there.

`packages` builds them once. Systems are made with mmdebstrap, and a
process with a mount namespace of its own runs in them, so that no mount outlives it.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.needs_root("it makes systems, and mounts in them")]
WITHOUT_COMPILER = {"CC": "/bin/false"}
"""What every build of C code asks for its compiler."""
FAST_PATHS = "requests, request loop, directory entries, suid and sgid"
MOUNT = """
set -eu
mkdir -p "$AT/lake" "$AT/mnt"
trap 'fusermount3 -u -z "$AT/mnt" 2>/dev/null || true' EXIT
"$PROGRAM" mount "file://$AT/lake" "$AT/mnt" --cache-dir "$AT/cache"
mkdir "$AT/mnt/many"
for number in $(seq 300); do echo "$number" > "$AT/mnt/many/$number"; done
head -c 20000000 /dev/urandom > "$AT/bytes"
cp "$AT/bytes" "$AT/mnt/bytes"
"$PROGRAM" umount "$AT/mnt"
"$PROGRAM" mount "file://$AT/lake" "$AT/mnt" --cache-dir "$AT/other-cache"
cmp "$AT/bytes" "$AT/mnt/bytes"
test "$(ls "$AT/mnt/many" | wc -l)" = 300
test "$(cat "$AT/mnt/many/300")" = 300
"$PROGRAM" umount "$AT/mnt"
"""
"""Writes files, and reads them through another cache directory."""
SESSION = """
import platform
from lakefs_fuse.kernel.native import hooks
import pyfuse3
assert hooks.libfuse_version().startswith("3."), hooks.why_absent()
try:
    pyfuse3.init(pyfuse3.Operations(), "/dev/null/none", set())
except RuntimeError:
    pass
print(platform.machine(), hooks.active())
"""
"""Makes a session, which is then mounted nowhere."""
OTHER = {"x86_64": ("aarch64", "arm64"), "aarch64": ("x86_64", "amd64")}
"""The architecture that a machine can only emulate, as wheels and as Debian name it."""
RESOLVER = Path("/etc/resolv.conf")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def run(*command: str | Path, **environment: str) -> str:
    """Run a program, and return what it printed; its errors are in the message of what is raised."""
    done = subprocess.run(
        [str(part) for part in command], env={**os.environ, **environment}, capture_output=True, text=True,
        check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def versions(text: str) -> dict[str, str]:
    """What `--version` printed, by its first column."""
    return {line[:12].strip(): line[12:] for line in text.splitlines()[1:]}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that `make dist` fills, of all workers: a build of the working tree disturbs another."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packages"
    with open(out.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            run(sys.executable, "-m", "scripts.dist", "deb", "--out", out.with_suffix(".partial"))
            out.with_suffix(".partial").rename(out)
    return out


def install(packages: Path, environment: Path, python: str, **variables: str) -> Path:
    """Install from the packages into a new virtual environment, and return the program."""
    run(python, "-m", "venv", environment)
    run(
        environment / "bin" / "pip", "install", "--quiet", "--prefer-binary", "--find-links", packages, "lakefs-fuse",
        **variables,
    )  # fmt: skip
    return environment / "bin" / "lakefs-fuse"


def mount_and_compare(program: Path, at: Path) -> None:
    at.mkdir()
    run("bash", "-c", MOUNT, PROGRAM=str(program), AT=str(at))


def make_system(release: str, root: Path, *included: str) -> Path:
    """A Debian of that release, with nothing but what every one has and these packages."""
    run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(('fuse3', *included))}", release, root)
    return root


def run_in(root: Path, script: str) -> str:
    """Run a shell script in a system that has this machine's devices; it can run MOUNT, as /tmp/work."""
    (root / "tmp" / "script").write_text(script)
    (root / "tmp" / "work").write_text(MOUNT)
    enter = 'mount --rbind /dev "$1/dev" && mount -t proc proc "$1/proc" && exec chroot "$1" /bin/bash /tmp/script'
    return run("unshare", "--mount", "--fork", "bash", "-c", enter, "enter", root)


def release_of_this_machine() -> str:
    return run("bash", "-c", '. /etc/os-release; echo "$VERSION_CODENAME"').strip()


def test_wheel_in_a_fresh_environment_needs_no_compiler_and_mounts(packages: Path, tmp_path: Path) -> None:
    program = install(packages, tmp_path / "environment", sys.executable, **WITHOUT_COMPILER)
    assert versions(run(program, "--version"))["fast paths"] == FAST_PATHS
    pages = tmp_path / "environment" / "share" / "man"
    assert "NVMe" in (pages / "man1" / "lakefs-fuse-mount.1").read_text()
    assert (pages / "man8" / "mount.lakefs.8").exists()
    mount_and_compare(program, tmp_path / "work")


def pythons_of_this_machine() -> dict[str, str]:
    """Paths of those that can run the program, by version; the one of the tests is always among them.

    They are on the path, or where pyenv installs them."""
    named = [shutil.which(f"python3.{minor}") for minor in range(11, 20)]
    installed = (Path.home() / ".pyenv" / "versions").glob("3.*/bin/python3")
    found = {}
    for path in [*named, *map(str, installed), sys.executable]:
        asked = path and subprocess.run(
            [path, "-c", "import sys; sys.version_info >= (3, 11) and print('%d.%d' % sys.version_info[:2])"],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        if path and asked and asked.stdout:
            found[asked.stdout.strip()] = path
    return found


def test_wheel_serves_every_python_of_this_machine(packages: Path, tmp_path: Path) -> None:
    """pyfuse3 is compiled for each other than the one of the tests, from the source that is among the packages."""
    pythons = pythons_of_this_machine()
    assert f"3.{sys.version_info.minor}" in pythons, "the Python of the tests serves at least"
    for version, path in pythons.items():
        program = install(packages, tmp_path / f"environment-{version}", path)
        told = versions(run(program, "--version"))
        assert told["Python"].startswith(f"{version}.")
        assert told["fast paths"] == FAST_PATHS
        mount_and_compare(program, tmp_path / f"work-{version}")


def test_wheel_with_uv_tool_install_and_pipx_makes_a_program(packages: Path, tmp_path: Path) -> None:
    tools = {"UV_TOOL_DIR": f"{tmp_path}/uv", "UV_TOOL_BIN_DIR": f"{tmp_path}/uv-bin", **WITHOUT_COMPILER}
    run("uv", "tool", "install", "--python", sys.executable, "--find-links", packages, "lakefs-fuse", **tools)
    assert versions(run(tmp_path / "uv-bin" / "lakefs-fuse", "--version"))["fast paths"] == FAST_PATHS
    pipx = {"PIPX_HOME": f"{tmp_path}/pipx", "PIPX_BIN_DIR": f"{tmp_path}/pipx-bin", **WITHOUT_COMPILER}
    pipx["PIPX_MAN_DIR"] = f"{tmp_path}/pipx-man"
    run("pipx", "install", "--python", sys.executable, f"--pip-args=--find-links {packages}", "lakefs-fuse", **pipx)
    assert versions(run(tmp_path / "pipx-bin" / "lakefs-fuse", "--version"))["fast paths"] == FAST_PATHS
    assert (tmp_path / "pipx-man" / "man1" / "lakefs-fuse-mount.1").exists()


def test_sdist_without_a_compiler_installs_without_fast_paths(packages: Path, tmp_path: Path) -> None:
    (sdist,) = packages.glob("lakefs_fuse-*.tar.gz")
    run(sys.executable, "-m", "venv", tmp_path / "environment")
    pip = tmp_path / "environment" / "bin" / "pip"
    run(pip, "install", "--quiet", "--prefer-binary", "--find-links", packages, sdist, **WITHOUT_COMPILER)
    program = tmp_path / "environment" / "bin" / "lakefs-fuse"
    told = run(program, "--version")
    assert versions(told)["fast paths"] == "none"
    assert "install lakefs-fuse from a wheel, or again with a compiler" in told
    version = sdist.name.removeprefix("lakefs_fuse-").removesuffix(".tar.gz")
    assert told.splitlines()[0] == f"lakefs-fuse {version}"
    mount_and_compare(program, tmp_path / "work")


def test_wheel_of_the_other_architecture_makes_sessions_under_emulation(packages: Path, tmp_path: Path) -> None:
    """With Python, libfuse and pyfuse3 of Debian for that architecture, which are extracted, not installed."""
    machine, architecture = OTHER[platform.machine()]
    (wheel,) = packages.glob(f"lakefs_fuse-*-py3-none-manylinux_2_28_{machine}.whl")
    shutil.unpack_archive(wheel, tmp_path / "wheel", "zip")
    root, included = tmp_path / "system", "python3,python3-pyfuse3,fuse3"
    run(
        "mmdebstrap", "--quiet", "--variant=extract", f"--architectures={architecture}", f"--include={included}",
        release_of_this_machine(), root,
    )  # fmt: skip
    (python,) = (root / "usr" / "bin").glob("python3.[0-9][0-9]")
    told = run(
        f"qemu-{machine}-static", "-L", root, python, "-P", "-c", SESSION,
        PYTHONHOME=f"{root}/usr", PYTHONPATH=f"{tmp_path}/wheel:{root}/usr/lib/python3/dist-packages",
    )  # fmt: skip
    assert told.split() == [machine, "True"]


def test_deb_in_a_fresh_system_mounts_as_mount_and_fstab_do(packages: Path, tmp_path: Path) -> None:
    (package,) = packages.glob("lakefs-fuse_*.deb")
    root = make_system(release_of_this_machine(), tmp_path / "system", "python3")
    shutil.copy(package, root / "tmp" / "package.deb")
    told = run_in(root, """
        set -eu
        dpkg -i /tmp/package.deb >&2
        mkdir /srv/lake /mnt/lake
        mount -t lakefs file:///srv/lake /mnt/lake -o cache_dir=/var/tmp/lakefs >&2
        trap 'fusermount3 -u -z /mnt/lake 2>/dev/null || true' EXIT
        echo content > /mnt/lake/file
        lakefs-fuse umount /mnt/lake >&2
        grep -q content /srv/lake/file
        AT=/var/tmp/work PROGRAM=lakefs-fuse bash /tmp/work >&2
        test -s /usr/share/man/man1/lakefs-fuse-mount.1.gz
        test -s /usr/share/man/man8/mount.lakefs.8.gz
        test ! -e /opt/lakefs-fuse/share
        . /usr/share/bash-completion/completions/lakefs-fuse
        lakefs-fuse --version
        dpkg --remove lakefs-fuse >&2
        test ! -e /opt/lakefs-fuse
    """)  # fmt: skip
    assert versions(told)["fast paths"] == FAST_PATHS


def test_wheel_with_libfuse_4_of_debian_13_mounts(packages: Path, tmp_path: Path) -> None:
    """libfuse 3.17 makes sessions with fuse_session_new_versioned; Debian's next release has it."""
    build = ("libfuse3-dev", "pkg-config", "gcc", "python3-dev", "python3-venv")
    root = make_system("trixie", tmp_path / "system", *build)
    shutil.copy(RESOLVER, root / "etc" / "resolv.conf")
    (root / CERTIFICATES.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    (root / "packages").mkdir()
    for path in [*packages.glob("lakefs_fuse-*.whl"), *packages.glob("pyfuse3-*.tar.gz")]:
        shutil.copy(path, root / "packages")
    told = run_in(root, """
        set -eu
        python3 -m venv /environment
        /environment/bin/pip install --quiet --prefer-binary --find-links /packages lakefs-fuse >&2
        AT=/var/tmp/work PROGRAM=/environment/bin/lakefs-fuse bash /tmp/work >&2
        /environment/bin/lakefs-fuse --version
    """)  # fmt: skip
    assert "(libfuse3.so.3.17" in versions(told)["libfuse"] or "(libfuse3.so.4" in versions(told)["libfuse"]
    assert versions(told)["fast paths"] == FAST_PATHS
