"""Everyday programs on a mount: fio, dd, tar, grep, du, find, sha256sum, SQLite."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mount.counting import upcalls
from tests.mount.lakes import MIB, Lake, noise, scale
from tests.tiers import IS_LONG

PACKAGE = Path(__file__).parents[2] / "lakefs_fuse"
SOURCES = PACKAGE if IS_LONG else PACKAGE / "store"
"""The tree that is read."""
FIO_MIB = scale("FIO_MIB", 6)


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}\n{done.stderr}"
    return done.stdout


FIO_JOBS = {
    "sequential": ["--rw=write", "--bs=128k", "--ioengine=psync"],
    "small": ["--rw=write", "--bs=4k", "--ioengine=psync", "--size=2M"],
    "random": ["--rw=randwrite", "--bs=16k", "--ioengine=psync"],
    "mixed": ["--rw=randrw", "--bs=4k", "--ioengine=psync", "--size=2M"],
    "mmap": ["--rw=randwrite", "--bs=16k", "--ioengine=mmap"],
    "fsync": ["--rw=write", "--bs=256k", "--ioengine=psync", "--fsync=4", "--size=2M"],
    "two-jobs": ["--rw=randwrite", "--bs=32k", "--ioengine=psync", "--numjobs=2"],
}


@pytest.mark.long
def test_fio_verifies(either: Lake) -> None:
    """Written, read back and checked at once, and again by a mount with an empty cache."""
    common = [f"--size={FIO_MIB}M", "--direct=0", "--fallocate=none", "--end_fsync=1"]
    common += ["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"]
    for name, job in FIO_JOBS.items():
        run("fio", f"--name={name}", *common, "--do_verify=1", *job, cwd=either.path)
    sizes = either.plain()
    assert len(sizes) == len(FIO_JOBS) + 1
    assert set(sizes.values()) == {FIO_MIB * MIB, 2 * MIB}
    either.remount(empty_cache=True)
    for name, job in FIO_JOBS.items():
        if name != "mixed":  # reads among its writes make the order of its blocks another one when it only verifies
            run("fio", f"--name={name}", *common, "--verify_only", *job, cwd=either.path)


def test_dd_with_o_direct(either: Lake, tmp_path: Path) -> None:
    data = noise(5 * MIB + 4096)
    source = tmp_path / "source"
    source.write_bytes(data)
    run("dd", f"if={source}", "of=f", "bs=1M", "oflag=direct", "conv=fsync", cwd=either.path)
    assert either.outside.read("f") == data
    run("dd", "if=f", f"of={tmp_path}/back", "bs=1M", "iflag=direct", cwd=either.path)
    assert (tmp_path / "back").read_bytes() == data
    run("dd", f"if={source}", "of=f", "bs=4k", "count=3", "seek=7", "oflag=direct", "conv=notrunc", cwd=either.path)
    expected = data[: 7 * 4096] + data[: 3 * 4096] + data[10 * 4096 :]
    assert either.outside.read("f") == expected
    either.remount(empty_cache=True)
    run("dd", "if=f", f"of={tmp_path}/back", "bs=1M", "iflag=direct", cwd=either.path)
    assert (tmp_path / "back").read_bytes() == expected


def test_direct_and_cached_access_agree(lake: Lake) -> None:
    (lake.path / "f").write_bytes(b"a" * 100_000)
    assert (lake.path / "f").read_bytes() == b"a" * 100_000
    run("sh", "-c", "head -c 8192 /dev/zero | tr '\\0' b | dd of=f bs=4096 oflag=direct conv=notrunc", cwd=lake.path)
    assert (lake.path / "f").read_bytes() == b"b" * 8192 + b"a" * (100_000 - 8192)


def test_a_source_tree_read_by_everyday_tools(either: Lake, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(SOURCES, tree, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (tree / "big.bin").write_bytes(noise(3 * MIB))
    run("cp", "-r", str(tree), "tree", cwd=either.path)
    sums = run("sh", "-c", "find . -type f -print0 | sort -z | xargs -0 sha256sum", cwd=tree)
    (tmp_path / "sums").write_text(sums)
    either.remount(empty_cache=True)
    mounted = either.path / "tree"
    checked = run("sha256sum", "-c", str(tmp_path / "sums"), cwd=mounted)
    assert checked.count(": OK") == len(sums.splitlines())
    for command in (
        ["grep", "-rc", "import", "--include=*.py", "."],
        ["find", ".", "-type", "f", "-size", "+2k"],
        ["find", ".", "-name", "*.py", "-o", "-type", "d"],
        ["du", "-ab", "--apparent-size", "--exclude=.", "."],
    ):
        ours, theirs = (sorted(run(*command, cwd=where).splitlines()) for where in (mounted, tree))
        if command[0] == "du":
            ours, theirs = ([line for line in lines if Path(tree / line.split("\t")[1]).is_file()] for lines in
                            (ours, theirs))  # fmt: skip
        assert ours == theirs
    run("tar", "-cf", str(tmp_path / "tree.tar"), ".", cwd=mounted)
    (tmp_path / "unpacked").mkdir()
    run("tar", "-xf", str(tmp_path / "tree.tar"), cwd=tmp_path / "unpacked")
    run("diff", "-r", str(tree), str(tmp_path / "unpacked"), cwd=tmp_path)
    run("tar", "--no-same-owner", "-xf", str(tmp_path / "tree.tar"), cwd=_made(either.path / "again"))
    run("diff", "-r", str(tree), str(either.path / "again"), cwd=tmp_path)
    run("rm", "-r", "tree", "again", cwd=either.path)
    assert list(either.path.iterdir()) == []
    either.settle()
    assert either.plain() == {}


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_shell_tools_and_editor_writes(lake: Lake) -> None:
    """Those that rename a temporary file over the one before among them."""
    script = """
    seq 1000 > numbers
    sort -rn numbers > sorted
    cat numbers sorted >> both
    split -l 100 numbers part-
    cat part-* | cmp - numbers
    tail -n 1 both | grep -qx 1
    truncate -s 10 both
    install -m 750 numbers installed
    gzip -c numbers > numbers.gz && gunzip -c numbers.gz | cmp - numbers
    gzip -k part-aa && gunzip -f part-aa.gz && cmp part-aa <(head -n 100 numbers)
    seq 3 > edited && sed -i s/2/two/ edited && test "$(cat edited)" = "$(printf '1\ntwo\n3')"
    sort -rn -o edited numbers && cmp edited sorted
    cp --remove-destination numbers edited && mv -f edited moved && test ! -e edited && cmp moved numbers
    ln -s moved link && cmp link numbers && ln -sfn numbers link && test "$(readlink link)" = numbers
    """
    run("bash", "-ec", script, cwd=lake.path)
    assert lake.outside.read("sorted").splitlines()[0] == b"1000"
    assert lake.outside.objects()["both"] == 10
    assert lake.outside.read("numbers") == lake.outside.read("installed")


def test_sqlite_costs_one_put_for_each_fsync(s3: Lake) -> None:
    """With the default journal, which is removed after each transaction, as mlflow uses it."""
    script = (
        "import sqlite3,sys; db=sqlite3.connect(sys.argv[1]); db.execute('create table t(n)'); db.commit()\n"
        "for n in range(20): db.execute('insert into t values(?)', (n,)); db.commit()"
    )
    before = upcalls(s3)
    puts = s3.puts()
    run("python3", "-c", script, str(s3.path / "db"), cwd=Path("/"))
    after = upcalls(s3)
    fsyncs = sum(after[name] - before[name] for name in ("fsync", "fsyncdir"))
    assert fsyncs > 60
    assert s3.puts() - puts <= fsyncs


@pytest.mark.parametrize("mode", ["memory", pytest.param("delete", marks=pytest.mark.long), "truncate"])
def test_sqlite(lake: Lake, mode: str) -> None:
    """Random access, locks and fsync of a real database, and journals that come and go."""
    script = (
        f"import sqlite3,sys; db=sqlite3.connect(sys.argv[1]); db.execute('pragma journal_mode={mode}');"
        "db.execute('create table t(n integer primary key, v text)');"
        "db.executemany('insert into t values(?,?)', ((n, 'v'*(n%200)) for n in range(3000))); db.commit();"
        "db.execute('delete from t where n%3=0'); db.commit(); db.execute('vacuum'); db.close();"
        "db=sqlite3.connect(sys.argv[1]); print(*db.execute('pragma integrity_check'), "
        "*db.execute('select count(*) from t'))"
    )
    said = run("python3", "-c", script, str(lake.path / "db"), cwd=Path("/"))
    assert said.split() == ["('ok',)", "(2000,)"]
