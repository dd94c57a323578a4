"""Path rules: what matches, what wins, and what is said about a file that cannot be used."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.config import MIB, MountConfig, Source, StoreConfig
from lakefs_fuse.errors import ConfigError
from lakefs_fuse.path_rules import FILE_BYTES_MAX, PackPolicy, Rules, parse_rules, read_rules, translate


def rules_of(text: str) -> Rules:
    return Rules(parse_rules(text.encode(), "rules.toml"), pack="auto", pack_threshold_bytes=MIB)


def matches(glob: str, path: str) -> bool:
    return re.fullmatch(translate(glob), path, re.DOTALL) is not None


@pytest.mark.parametrize(
    ("glob", "inside", "outside"),
    [
        ("ckpt/**", ["ckpt/a", "ckpt/a/b", "ckpt/a\nb"], ["ckpt", "ckpts/a", "x/ckpt/a"]),
        ("ckpt/*", ["ckpt/a", "ckpt/.hidden"], ["ckpt/a/b", "ckpt"]),
        ("**/*.json", ["a.json", "x/a.json", "x/y/a.json"], ["a.jsonl", "a.json/b"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["ab", "a/xb", "x/a/b"]),
        ("**", ["a", "a/b"], []),
        ("shard-?[0-9].bin", ["shard-a1.bin"], ["shard-1.bin", "shard-/1.bin", "shard-aa.bin"]),
        ("[!a-c]x", ["dx"], ["ax", "/x", "x"]),
        ("[]^&~|[-]", ["]", "^", "[", "-"], ["a", "\\"]),
        ("a.b+(c)", ["a.b+(c)"], ["aXb+(c)"]),
    ],
)
def test_globs(glob: str, inside: list[str], outside: list[str]) -> None:
    assert [path for path in inside if not matches(glob, path)] == []
    assert [path for path in outside if matches(glob, path)] == []


@given(st.text(st.characters(codec="utf-8", exclude_characters="*?[/"), min_size=1).filter(lambda t: t not in "..")
       )  # fmt: skip
def test_a_path_without_wildcards_matches_itself_alone(path: str) -> None:
    assert matches(path, path)
    assert not matches(path, path + "x")


@pytest.mark.parametrize("glob", ["", "/a", "a/", "a//b", "a/../b", "a**", "a/**b/c", "**/**", "x[", "x[a", "[z-a]"])
def test_what_is_no_glob_is_refused_by_its_name(glob: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(glob))):
        translate(glob)


def test_the_last_match_wins_for_each_setting() -> None:
    rules = rules_of(
        """
        [[rule]]
        path = "data/**"
        pack = "always"
        pack-threshold = "256KiB"
        [[rule]]
        path = "data/raw/**"
        pack = "never"
        [[rule]]
        path = "**/*.idx"
        pack-threshold = 100
        """
    )
    assert rules.pack_for("other") == PackPolicy("auto", MIB)
    assert rules.pack_for("data/a") == PackPolicy("always", 256 << 10)
    assert rules.pack_for("data/raw/a") == PackPolicy("never", 256 << 10)
    assert rules.pack_for("data/raw/a.idx") == PackPolicy("never", 100)
    assert rules.pack_for("data/raw/a.idx") == PackPolicy("never", 100)
    assert rules.pack_for("a.idx") == PackPolicy("auto", 100)


def test_exclusive_creation_relies_on_the_cache_under_writeback_unless_a_rule_says_otherwise() -> None:
    rules = rules_of(
        """
        [[rule]]
        path = "fast/**"
        durability = "writeback"
        [[rule]]
        path = "fast/locks/*"
        exclusive-create = "store"
        [[rule]]
        path = "alone/*"
        exclusive-create = "cache"
        """
    )
    asked = [path for path in ("a", "fast/a", "fast/locks/a", "alone/a") if rules.asks_store_for_exclusive_create(path)]
    assert asked == ["a", "fast/locks/a"]
    assert rules.asks_store_anywhere


@pytest.mark.parametrize(
    ("rule", "durability", "asks"),
    [
        ("", "writeback", False),
        ("", "close", True),
        ('exclusive-create = "store"', "writeback", True),
        ('exclusive-create = "cache"', "writeback", False),
        ('durability = "close"', "writeback", True),
        ('durability = "writeback"', "close", True),
    ],
)
def test_exclusive_creation_asks_somewhere(rule: str, durability: str, asks: bool) -> None:
    parsed = parse_rules(f'[[rule]]\npath = "a/**"\n{rule}'.encode(), "rules.toml") if rule else ()
    rules = Rules(parsed, pack="auto", pack_threshold_bytes=1, durability=durability)
    assert rules.asks_store_anywhere == asks


def test_publishing_of_open_files() -> None:
    rules = rules_of(
        """
        [[rule]]
        path = "runs/**"
        publish = "10s"
        [[rule]]
        path = "runs/**/*.ckpt"
        publish = 0
        """
    )
    assert rules.publishes_open_files
    assert [rules.publish_s(path) for path in ("runs/a/events", "runs/a/b.ckpt", "a")] == [10.0, 0.0, 0.0]
    assert not rules_of("[[rule]]\npath = 'a'\npublish = 0").publishes_open_files


def test_the_daemon_gets_them_with_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('[[rule]]\npath = "höh/*"\npack = "never"\n')
    store = StoreConfig(source=Source.parse("file:///lake"))
    config = MountConfig(store=store, mountpoint="/m", cache_dir="/c", pack="always", rules=read_rules(file))
    arrived = msgspec.json.decode(msgspec.json.encode(config), type=MountConfig)
    assert arrived == config
    rules = Rules.of(arrived)
    assert rules.pack_for("höh/a").mode == "never"
    assert rules.pack_for("a") == PackPolicy("always", arrived.pack_threshold_bytes)


def test_a_file_may_have_no_rules() -> None:
    assert parse_rules(b"# nothing yet\n", "rules.toml") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[rule]\n", "not TOML.*line 1"),
        ("\xff", "not TOML"),
        ("rules = 1", "unknown key 'rules'.*only \\[\\[rule\\]\\]"),
        ("[rule]\npath = 'a'", "two brackets"),
        ("[[rule]]\npath = 'a'\n\n[[rule]]\npak = 'never'\npath = 'b'",
         "rule 2 \\(line 4\\).*unknown field `pak`; accepted keys are path, pack, pack-threshold"),
        ("[[rule]]\npack = 'never'", "rule 1 \\(line 1\\).*`path`"),
        ("rule = [{path = 'a', pack = 'maybe'}]", "rule 1: pack 'maybe': expected auto, always or never"),
        ("[[rule]]\npath = 'a'\npublish = 'often'", "'often' is not a duration"),
        ("[[rule]]\npath = 'a'\npublish = '10ms'", "publish 0.01: expected 0, or 1 s or more"),
        ("[[rule]]\npath = 'a'\npublish = nan", "publish nan: expected 0, or 1 s or more"),
        ("[[rule]]\npath = 'a'\npublish = inf", "publish inf: expected 0, or 1 s or more, ten years at most"),
        ("[[rule]]\npath = 'a'\npack-threshold = " + "9" * 5000, "not TOML"),
        ("[[rule]]\npath = 'a'\npack-threshold = '" + "9" * 5000 + "'", "is not a size"),
        ("[[rule]]\npath = 'a'\npack-threshold = '" + "9" * 400 + ".5G'", "is not a size"),
        ("[[rule]]\npath = 'a'\nexclusive-create = 'no'", "exclusive-create 'no': expected store or cache"),
        ("[[rule]]\npath = 'a'\npack-threshold = -1", "line 1.*pack-threshold -1: expected 0 to 64MiB"),
        ("[[rule]]\npath = 'a'\npack-threshold = '1GiB'", "expected 0 to 64MiB"),
        ("[[rule]]\npath = 'a'\npack-threshold = 'much'", "'much' is not a size"),
        ("[[rule]]\npath = 'a'\npack-threshold = true", "pack-threshold"),
        ("[[rule]]\npath = '/a'", "line 1.*path '/a'"),
        ("[[rule]]\npath = 'a'\n" * 1001, "1001 rules"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_where_it_is(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)rules file rules.toml.*{said}"):
        parse_rules(text.encode("latin-1"), "rules.toml")


def test_a_file_that_is_missing_or_absurd(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*check --rules"):
        read_rules(tmp_path / "none")
    big = tmp_path / "big"
    big.write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match=str(FILE_BYTES_MAX)):
        read_rules(big)
