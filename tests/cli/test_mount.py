"""`lakefs-fuse mount`: what the arguments become, and what is refused before a daemon is started."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import platformdirs
import pytest

from lakefs_fuse import __version__
from lakefs_fuse.cli import preflight, run, spawn
from lakefs_fuse.cli.mount import mount
from lakefs_fuse.cli.parameters import DURATION, RATE, SIZE
from lakefs_fuse.config import GIB, MIB, MountConfig, Rule, Source, StoreConfig


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> list[MountConfig]:
    """The configurations that would have been mounted."""
    configs: list[MountConfig] = []
    monkeypatch.setattr(spawn, "start", configs.append)
    monkeypatch.setattr(spawn, "exec_in_foreground", configs.append)
    monkeypatch.setattr(preflight, "check", lambda config, host: [])
    return configs


def test_every_option_arrives(mounted: list[MountConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ca.pem").touch()
    (tmp_path / "rules.toml").write_text(
        '[[rule]]\npath = "ckpt/**"\npack = "never"\ndurability = "close"\nkeep-newest = 2\n'
        'exclusive-create = "cache"\npublish = "1m"\n'
    )
    arguments = """mount s3://bucket/some/prefix mnt --cache-dir cache --cache-size 3GiB --staging-size 2G
        --free-space 100M --endpoint-url http://localhost:8333/ --region eu-1 --profile lab --addressing-style path
        --ca-bundle ca.pem --metadata-ttl 5m --read-only --allow-other --uid 1000 --gid 100 --file-mode 600
        --dir-mode 0700 --uploads 8 --requests 64 --retry-timeout 2m --orphans finish --attributes objects
        --log-file lake.log --pack always --pack-threshold 256K --refresh 1.5s --rules rules.toml --delete-after 0
        --durability writeback --writeback-delay 500ms --publish 10s --staging-timeout 10m --upload-limit 2GiB/s
        --no-supervise --log-level debug --foreground --foreign 2m --maintenance off --hard-links local
        --cluster-cache http://cache-1:8080/,https://cache-2:8443 --trust-cluster-cache
        --hints redis://user@localhost:6380/2 --memory 1GiB --download-limit 500M/s
        --requester-pays --sse kms:arn:aws:kms:eu-1:1:key/some-id --storage-class STANDARD_IA""".split()
    assert run(arguments) == 0
    (config,) = mounted
    assert msgspec.to_builtins(config) == {
        "store": {
            "source": {"scheme": "s3", "bucket": "bucket", "prefix": "some/prefix/"},
            "endpoint_url": "http://localhost:8333",
            "region": "eu-1",
            "profile": "lab",
            "addressing_style": "path",
            "ca_bundle": str(tmp_path / "ca.pem"),
            "connect_timeout_s": StoreConfig(source=config.store.source).connect_timeout_s,
            "read_timeout_s": StoreConfig(source=config.store.source).read_timeout_s,
            "retry_timeout_s": 120.0,
            "requests_max": 64,
            "unsigned": False,
            "requester_pays": True,
            "sse": "kms:arn:aws:kms:eu-1:1:key/some-id",
            "storage_class": "STANDARD_IA",
        },
        "mountpoint": str(tmp_path / "mnt"),
        "cache_dir": str(tmp_path / "cache"),
        "cache_bytes_max": 3 * GIB,
        "cluster_cache": ("http://cache-1:8080", "https://cache-2:8443"),
        "trust_cluster_cache": True,
        "free_bytes_min": 100 * MIB,
        "staging_bytes_max": 2 * GIB,
        "metadata_ttl_s": 300.0,
        "foreign_s": 120.0,
        "hints": "redis://user@localhost:6380/2",
        "read_only": True,
        "immutable": False,
        "snapshot": "",
        "dataset": "",
        "records_residency": False,
        "folds": False,
        "mounting": "",
        "allow_other": True,
        "uid": 1000,
        "gid": 100,
        "file_mode": 0o600,
        "dir_mode": 0o700,
        "uploads_max": 8,
        "log_file": str(tmp_path / "lake.log"),
        "log_level": "DEBUG",
        "foreground": True,
        "orphans": "finish",
        "attributes": "objects",
        "pack": "always",
        "pack_threshold_bytes": 256 << 10,
        "refresh_s": 1.5,
        "rules": (
            {
                "path": "ckpt/**",
                "pack": "never",
                "pack_threshold_bytes": None,
                "durability": "close",
                "keep_newest": 2,
                "exclusive_create": "cache",
                "publish_s": 60.0,
            },
        ),
        "delete_after_s": 0.0,
        "durability": "writeback",
        "hard_links": "local",
        "writeback_delay_s": 0.5,
        "publish_s": 10.0,
        "staging_timeout_s": 600.0,
        "upload_bytes_s_max": 2 * GIB,
        "download_bytes_s_max": 500 * MIB,
        "memory_bytes_max": GIB,
        "maintenance": "off",
        "supervise": False,
    }


def test_an_immutable_mount(mounted: list[MountConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["mount", "s3://bucket", "/mnt/lake"]) == 0
    assert run(["mount", "s3://bucket", "/mnt/lake", "-o", "rw,immutable"]) == 0
    assert run(["mount", "s3://bucket", "/mnt/lake", "-o", "immutable,snapshot=v1"]) == 0
    usual, now, snapshot = mounted
    assert (usual.immutable, usual.read_only) == (False, False)
    assert (now.immutable, now.read_only, now.snapshot) == (True, True, "")
    assert (snapshot.immutable, snapshot.read_only, snapshot.snapshot) == (True, True, "v1")
    assert len({config.cache_dir for config in mounted}) == 3, "each has names of its own"
    assert usual.mounting == ""
    assert now.mounting != snapshot.mounting, "each command has a state of its own"
    for arguments, said in (
        (["s3://bucket", "/mnt/lake", "--snapshot", "v1"], "--snapshot needs --immutable"),
        (["s3://bucket", "/mnt/lake", "-o", "immutable,durability=writeback"], "--durability: an --immutable mount"),
        (["s3://bucket", "--immutable"], "MOUNTPOINT is missing"),
        (["s3://bucket"], "MOUNTPOINT is missing"),
    ):
        assert run(["mount", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert run(["mount", "--immutable", "/proc/sys"]) == 1
    assert "is not inside a mount of this program, and not a source URL" in capsys.readouterr().err


def test_unsigned_mount_is_read_only_unless_told(
    mounted: list[MountConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["mount", "s3://bucket", "/mnt/lake"]) == 0
    assert run(["mount", "s3://bucket", "/mnt/lake", "--unsigned"]) == 0
    assert run(["mount", "s3://bucket", "/mnt/lake", "-o", "unsigned,rw"]) == 0
    assert run(["mount", "s3://bucket", "/mnt/lake", "--unsigned", "--dataset", "a@1"]) == 0
    assert [(config.store.unsigned, config.read_only, config.records_residency) for config in mounted] == [
        (False, False, False), (True, True, False), (True, False, False), (True, True, False),
    ]  # fmt: skip
    for arguments, said in (
        (["file:///lake", "--unsigned"], "--unsigned: file:///lake is not an S3 store: leave the option out"),
        (["s3://bucket", "--unsigned", "--profile-for", "checkpoints"], "is for writable mounts"),
        (["s3://bucket", "--unsigned", "--requester-pays"], "exclude each other: the account that pays must sign"),
        (["file:///lake", "--requester-pays"], "--requester-pays: file:///lake is not an S3 store"),
    ):
        assert run(["mount", arguments[0], "/mnt/lake", *arguments[1:]]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sse", "aes"], "'aes' is not an encryption: expected s3, kms or kms:KEY-ID"),
        (["--sse", "kms:"], "is not an encryption"),
        (["--sse", "kms:a key"], "is not an encryption"),
        (["--storage-class", "a class"], "is not a storage class: expected for example STANDARD_IA"),
        (["--storage-class", "DEEP_ARCHIVE"], "DEEP_ARCHIVE is an archive, whose objects cannot be read at once"),
        (["--immutable", "--sse", "s3"], "--sse: an --immutable mount writes nothing"),
        (["--immutable", "--storage-class", "STANDARD_IA"], "--storage-class: an --immutable mount writes nothing"),
    ],
)
def test_how_objects_are_stored_is_checked(
    mounted: list[MountConfig], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run(["mount", "s3://bucket", "/mnt/lake", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_cluster_cache_is_checked(mounted: list[MountConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["mount", "s3://bucket", "/mnt/lake", "-o", "cluster_cache=http://a:1;http://b:2;http://a:1"]) == 0
    assert mounted[0].cluster_cache == ("http://a:1", "http://b:2")
    assert not mounted[0].trust_cluster_cache
    for arguments, said in (
        (["s3://bucket", "--cluster-cache", "cache-1:8080"], "is not a cluster cache: expected for example http://"),
        (["s3://bucket", "--cluster-cache", "http://cache-1/path"], "is not a cluster cache"),
        (["s3://bucket", "--cluster-cache", "http://u:secret@c:1"], "put it in LAKEFS_CLUSTER_CACHE_TOKEN"),
        (["s3://bucket", "--cluster-cache", "u:secret@c:1"], "put it in LAKEFS_CLUSTER_CACHE_TOKEN"),
        (["s3://bucket", "--cluster-cache", "http://[::1"], "is not a cluster cache"),
        (["s3://bucket", "--cluster-cache", "http://c:99999"], "is not a cluster cache"),
        (["s3://bucket", "--cluster-cache", ","], "names no proxy"),
        (["s3://bucket", "--trust-cluster-cache"], "--trust-cluster-cache needs --cluster-cache"),
        (["file:///lake", "--cluster-cache", "http://a:1"], "is not an S3 store"),
    ):
        assert run(["mount", arguments[0], "/mnt/lake", *arguments[1:]]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "secret" not in error


def test_what_is_not_given_has_the_defaults_of_the_configuration(mounted: list[MountConfig]) -> None:
    assert run(["mount", "s3://bucket", "/mnt/lake"]) == 0
    (config,) = mounted
    plain = MountConfig(
        store=StoreConfig(source=config.store.source),
        mountpoint="/mnt/lake",
        cache_dir=config.cache_dir,
        log_file=config.log_file,
    )
    assert config == plain
    assert Path(config.cache_dir).parent == Path(platformdirs.user_cache_dir("lakefs-fuse"))
    assert config.log_file is not None
    assert Path(config.log_file).name.startswith("mnt-lake-")


def test_help_and_readme_tell_the_defaults_that_hold() -> None:
    texts = {option.opts[0]: getattr(option, "help", None) or "" for option in mount.params}
    told = {name: match[1] for name, text in texts.items() if (match := re.search(r"\[default: (\S+)\]", text))}
    config = MountConfig(store=StoreConfig(source=Source.parse("file:///data")), mountpoint="", cache_dir="")
    assert SIZE.convert(told["--cache-size"], None, None) == config.cache_bytes_max
    assert SIZE.convert(told["--staging-size"], None, None) == config.staging_bytes_max
    assert SIZE.convert(told["--free-space"], None, None) == config.free_bytes_min
    assert DURATION.convert(told["--metadata-ttl"], None, None) == config.metadata_ttl_s
    assert int(told["--file-mode"], 8) == config.file_mode
    assert int(told["--dir-mode"], 8) == config.dir_mode
    assert int(told["--uploads"]) == config.uploads_max
    assert int(told["--requests"]) == config.store.requests_max
    assert DURATION.convert(told["--retry-timeout"], None, None) == config.store.retry_timeout_s
    assert told["--orphans"] == config.orphans
    assert told["--attributes"] == config.attributes
    assert told["--log-level"] == config.log_level
    assert told["--pack"] == config.pack
    assert told["--maintenance"] == config.maintenance
    assert told["--hard-links"] == config.hard_links
    assert SIZE.convert(told["--pack-threshold"], None, None) == config.pack_threshold_bytes
    assert DURATION.convert(told["--refresh"], None, None) == config.refresh_s
    assert DURATION.convert(told["--delete-after"], None, None) == config.delete_after_s
    assert told["--durability"] == config.durability
    assert DURATION.convert(told["--writeback-delay"], None, None) == config.writeback_delay_s
    assert DURATION.convert(told["--staging-timeout"], None, None) == config.staging_timeout_s
    assert RATE.convert(told["--upload-limit"], None, None) == config.upload_bytes_s_max
    assert RATE.convert(told["--download-limit"], None, None) == config.download_bytes_s_max
    assert SIZE.convert(told["--memory"], None, None) == config.memory_bytes_max
    assert texts["--upload-limit"].endswith("; 0 is no limit.  [default: 0]")
    assert told["--addressing-style"] == config.store.addressing_style
    modes = f"{told.pop('--file-mode')}, {told.pop('--dir-mode')}"
    rows = re.findall(r"^\| `(--[a-z-]+)[^|]*\| ([^|]+) \|", options_table(), re.MULTILINE)
    assert dict(rows)["--file-mode"] == modes
    del told["--uid"], told["--gid"]
    assert {name: dict(rows)[name] for name in told} == told
    named = dict(re.findall(r"^\| `(--[a-z-]+)[^|]*\| ([^|]+) \|", options_used_most(), re.MULTILINE))
    assert len(named) == 9
    assert {name: default for name, default in named.items() if name in told} == {
        name: told[name] for name in named if name in told
    }


def options_table() -> str:
    manual = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    return manual[manual.index("### Options of `mount`") : manual.index("### Upgrading a lake")]


def options_used_most() -> str:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    return readme[readme.index("## Options used most") : readme.index("## Documentation")]


def test_options_as_mount8_passes_them(mounted: list[MountConfig]) -> None:
    options = "rw,_netdev,noauto,nofail,user,x-systemd.automount,allow_other,cache_size=5G,file-mode=0640"
    assert run(["mount", "file:///data", "/mnt/lake", "-o", options, "-ouid=7", "-o", "ro"]) == 0
    (config,) = mounted
    assert config.allow_other
    assert config.read_only
    assert (config.cache_bytes_max, config.file_mode, config.uid) == (5 * GIB, 0o640, 7)


def test_packing_through_mount8(mounted: list[MountConfig], tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\npath = "**/*.json"\npack-threshold = "4KiB"\n')
    options = f"pack=never,pack_threshold=2M,refresh=10,delete_after=7m,rules={rules}"
    assert run(["mount", "file:///data", "/mnt/lake", "-o", options]) == 0
    (config,) = mounted
    assert (config.pack, config.pack_threshold_bytes, config.refresh_s) == ("never", 2 * MIB, 10.0)
    assert config.delete_after_s == 420.0
    assert config.rules == (Rule(path="**/*.json", pack_threshold_bytes=4096),)


def test_write_back_through_mount8(mounted: list[MountConfig]) -> None:
    options = "durability=writeback,writeback_delay=0,staging_timeout=5m,upload_limit=100M,no_supervise"
    assert run(["mount", "file:///data", "/mnt/lake", "-o", options]) == 0
    (config,) = mounted
    assert (config.durability, config.writeback_delay_s, config.staging_timeout_s) == ("writeback", 0.0, 300.0)
    assert (config.upload_bytes_s_max, config.supervise) == (100 * MIB, False)


def test_the_last_one_wins_wherever_it_comes_from(mounted: list[MountConfig]) -> None:
    assert run(["mount", "file:///data", "/mnt/lake", "-o", "uid=1,ro", "--uid", "2", "-o", "rw"]) == 0
    (config,) = mounted
    assert (config.uid, config.read_only) == (2, False)


def test_an_option_value_that_looks_like_an_option_is_a_value(mounted: list[MountConfig]) -> None:
    assert run(["mount", "--region", "-o", "file:///data", "/mnt/lake"]) == 0
    assert mounted[0].store.region == "-o"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-o", "cache_sizes=5G"], "cache_sizes"),
        (["-o", "secret_access_key=x"], "secret_access_key"),
        (["-o", "noexec"], "noexec"),
        (["-o", "mount_o=x"], "mount_o"),
        (["-o", "allow_other=yes"], "allow_other"),
        (["-o", "cache_size"], "cache_size"),
        (["-o"], "-o"),
        (["--cache-size", "lots"], "--cache-size"),
        (["--cache-size", "10"], "--cache-size"),
        (["--uploads", "0"], "--uploads"),
        (["--uid", "nobody"], "'--uid': 'nobody' is not a valid whole number"),
        (["--orphans", "eat"], "--orphans"),
        (["--attributes", "guess"], "--attributes"),
        (["--pack", "sometimes"], "--pack"),
        (["--pack-threshold", "-1"], "--pack-threshold"),
        (["--pack-threshold", "65M"], "--pack-threshold"),
        (["--refresh", "-5"], "--refresh"),
        (["--refresh", "0"], "--refresh"),
        (["--delete-after", "-1"], "--delete-after"),
        (["--durability", "sometimes"], "--durability"),
        (["--writeback-delay", "-1"], "--writeback-delay"),
        (["--staging-timeout", "long"], "--staging-timeout"),
        (["--upload-limit", "2GiB/h"], "--upload-limit"),
        (["--download-limit", "-1"], "--download-limit"),
        (["--memory", "100M"], "--memory"),
        (["--staging-size", "10"], "--staging-size"),
        (["--staging-size", "47MiB"], "--staging-size"),
        (["--uid", "nobody"], "--uid"),
        (["-o", "supervise=no"], "supervise"),
        (["-o", "cache_sise=5G"], "did you mean cache_size? (see `lakefs-fuse mount --help`)"),
        (["--rules", "/nonexistent/rules.toml"], "--rules"),
        (["-o", "pack=sometimes"], "--pack"),
        (["--ca-bundle", "/nonexistent/ca.pem"], "--ca-bundle"),
        (["--endpoint-url", "localhost:8333"], "--endpoint-url"),
        (["--endpoint-url", "http://key:topsecret@localhost"], "--endpoint-url"),
        (["--endpoint-url", "http://host:99999"], "--endpoint-url"),
        (["--endpoint-url", "http://host:port"], "--endpoint-url"),
        (["--endpoint-url", "http://[host"], "--endpoint-url"),
        (["--endpoint-url", "http://ho\tst"], "--endpoint-url"),
    ],
)
def test_usage_errors_are_one_line_that_names_the_option(
    mounted: list[MountConfig], capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert run(["mount", "file:///data", "/mnt/lake", *arguments]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.startswith("lakefs-fuse: ")
    assert error.count("\n") == 1
    assert "topsecret" not in error
    assert mounted == []


@pytest.mark.parametrize(
    "source",
    [
        "bucket",
        "http://bucket",
        "s3://",
        "file://relative",
        "s3://k:s@bucket",
        "s3://b/../c",
        "file:///a/../b",
        "file:///tmp/a\tb",
        "file:///tmp/new\nline",
        "s3://[abc",
        "s3://two words/x",
        "s3://bucket:80/x",
        "file:///tmp/\udcff",
        "s3://b/.lakefs",
        "s3://b/lake/.lakefs/index",
        "file:///data/.lakefs",
    ],
)
def test_sources_that_are_none(mounted: list[MountConfig], capsys: pytest.CaptureFixture[str], source: str) -> None:
    assert run(["mount", source, "/mnt/lake"]) == 2
    assert "source" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["s3://a", ""], "the path is empty"),
        (["s3://a", "mnt", "--cache-dir", ""], "the path is empty"),
        (["s3://a", "mnt", "--log-file="], "the path is empty"),
        (["s3://a", "mnt", "--immutable", "--snapshot", ""], "the name is empty"),
    ],
)
def test_empty_values_as_of_variables_that_are_not_set_are_refused(
    mounted: list[MountConfig], capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    """They would be the working directory, or the present state."""
    assert run(["mount", *arguments]) == 2
    assert (why in capsys.readouterr().err, mounted) == (True, [])


@pytest.mark.parametrize("option", ["--name", "--delete"])
def test_snapshot_without_a_name_is_refused(option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["snapshot", f"file://{tmp_path}", option, ""]) == 2
    assert "the name of the snapshot is empty" in capsys.readouterr().err


def test_a_cache_directory_belongs_to_one_lake(mounted: list[MountConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    for arguments in (["s3://a"], ["s3://a/b"], ["s3://a", "--endpoint-url", "http://x"], ["s3://a", "--profile", "p"]):
        run(["mount", *arguments, "/mnt/lake"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://y")
    run(["mount", "s3://a", "/mnt/lake"])
    assert len({config.cache_dir for config in mounted}) == 5
    run(["mount", "s3://a", "/mnt/elsewhere"])
    assert mounted[-1].cache_dir == mounted[-2].cache_dir
    assert mounted[-1].log_file != mounted[-2].log_file


def test_version_and_missing_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out
    assert run(["frobnicate"]) == 2
    assert "frobnicate" in capsys.readouterr().err


def test_dataset_is_the_snapshot_of_its_version_and_implies_immutable(mounted: list[MountConfig]) -> None:
    for options in ("--dataset im@3", "-o dataset=im@3", "--dataset im@3 --read-only", "--immutable --snapshot im.v3"):
        assert run(["mount", "s3://bucket", "mnt", *options.split()]) == 0
    of_version, helper, read_only, snapshot = mounted
    assert (of_version.dataset, of_version.snapshot, of_version.immutable) == ("im@3", "im.v3", True)
    assert of_version.records_residency
    assert helper.dataset == "im@3"
    assert not read_only.records_residency
    assert not snapshot.dataset
    assert run(["mount", "s3://bucket", "--dataset", "im@3"]) == 2


def test_foreign_is_a_duration_or_auto(mounted: list[MountConfig]) -> None:
    for given in ("--foreign auto", "--foreign 90", "-o foreign=2m", "-o foreign=auto"):
        assert run(["mount", "s3://bucket", "mnt", *given.split()]) == 0
    assert [config.foreign_s for config in mounted] == [None, 90.0, 120.0, None]
    assert run(["mount", "s3://bucket", "mnt", "--foreign", "seldom"]) != 0


def test_the_manual_has_every_option_and_no_other() -> None:
    named = set(re.findall(r"--[a-z][a-z-]+", options_table()))
    options = {name for option in mount.params for name in (*option.opts, *option.secondary_opts) if name[:2] == "--"}
    assert named == options
    assert set(re.findall(r"--[a-z][a-z-]+", options_used_most())) - {"--help"} < options


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://user:secret@localhost", "LAKEFS_HINTS_PASSWORD"),
        ("redis://:secret@localhost", "LAKEFS_HINTS_PASSWORD"),
        ("http://localhost", "expected redis://"),
        ("localhost:6379", "expected redis://"),
        ("redis://localhost:99999", "expected redis://"),
        ("redis://localhost/name", "the database is a number"),
        ("redis://localhost/0?db=1", "expected redis://"),
    ],
)
def test_hints_url_that_is_wrong_is_refused(
    url: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["mount", f"file://{tmp_path}", str(tmp_path / "mnt"), "--hints", url]) == 2
    told = capsys.readouterr().err
    assert why in told
    assert "secret" not in told


def test_hints_without_redis_py_name_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert run(["mount", f"file://{tmp_path}", str(tmp_path / "mnt"), "--hints", "rediss://localhost/1"]) == 2
    assert "lakefs-fuse[hints]" in capsys.readouterr().err
