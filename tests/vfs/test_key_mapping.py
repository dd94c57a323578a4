"""Which keys are names, and which names are keys."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.config import Source
from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.product import PLACEHOLDER
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.vfs.namespace.key_mapping import (
    KEY_BYTES_MAX,
    Hidden,
    KeyLimits,
    checked_name,
    is_reserved,
    path_of_key,
    why_hidden,
)


@pytest.mark.parametrize(
    ("component", "reason"),
    [
        ("", Hidden.COMPONENT),
        (".", Hidden.COMPONENT),
        ("..", Hidden.COMPONENT),
        ("a\0b", Hidden.NUL),
        ("x" * 256, Hidden.LONG),
        ("é" * 128, Hidden.LONG),
        ("x" * 255, None),
        ("...", None),
        (" ", None),
        ("\n", None),
        ("\udc80", None),
    ],
)
def test_reasons(component: str, reason: Hidden | None) -> None:
    assert why_hidden(component) is reason


def test_reserved_names() -> None:
    assert is_reserved(ROOT_INODE, ".lakefs")
    assert not is_reserved(5, ".lakefs")
    assert is_reserved(5, PLACEHOLDER)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("d/f", "d/f"),
        ("d/", "d/"),
        (f"d/{PLACEHOLDER}", "d/"),
        (PLACEHOLDER, ""),
        (f"d/notes{PLACEHOLDER}", f"d/notes{PLACEHOLDER}"),
        (f"{PLACEHOLDER}/f", f"{PLACEHOLDER}/f"),
    ],
)
def test_path_of_key_of_a_marker_is_that_of_its_directory(key: str, path: str) -> None:
    assert path_of_key(key) == path


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (b"x" * 256, errno.ENAMETOOLONG),
        (b"\xff", errno.EILSEQ),
        (b".", errno.EINVAL),
        (b"", errno.EINVAL),
        (b"a\0", errno.EINVAL),
        (b"a/b", errno.EINVAL),
        (b".lakefs", errno.EPERM),
        (PLACEHOLDER.encode(), errno.EPERM),
    ],
)
def test_names_that_are_refused(name: bytes, code: int) -> None:
    with pytest.raises(FileError) as caught:
        checked_name(ROOT_INODE, name)
    assert caught.value.errno == code


@given(st.binary(max_size=300))
def test_what_is_accepted_is_shown(name: bytes) -> None:
    try:
        component = checked_name(ROOT_INODE, name)
    except FileError:
        return
    assert component.encode() == name
    assert why_hidden(component) is None
    assert not is_reserved(ROOT_INODE, component)


def test_keys_that_are_too_long() -> None:
    assert key_limits().checked_key("a/" * 500, "x" * 24) == "a/" * 500 + "x" * 24
    at_end = "p" * (KEY_BYTES_MAX - 1) + "/"
    for prefix, component, source in (("a/" * 500, "x" * 25, ""), ("a/" * 500, "é" * 13, ""), ("", "x", at_end)):
        with pytest.raises(FileError) as caught:
            key_limits(source).checked_key(prefix, component)
        assert caught.value.errno == errno.ENAMETOOLONG


def test_key_limits_leave_room_for_the_prefix_of_the_source() -> None:
    limits = key_limits("lake/")
    assert limits.name_bytes_max(ROOT_INODE) == limits.path_bytes_max == KEY_BYTES_MAX - len("lake/")
    assert limits.name_bytes_max(ROOT_INODE + 1) == KEY_BYTES_MAX - len("lake/directory/")
    limits.check_paths(["x" * limits.path_bytes_max])
    with pytest.raises(FileError) as caught:
        limits.check_paths(["short", "x" * limits.path_bytes_max + "x"])
    assert caught.value.errno == errno.ENAMETOOLONG


def test_key_limits_refuse_characters_that_the_store_would_change() -> None:
    assert key_limits().checked_path(ROOT_INODE + 1, b"a?b") == "directory/a?b"
    assert key_limits().takes_plain_names
    limits = key_limits(characters_refused="?")
    assert not limits.takes_plain_names
    with pytest.raises(FileError) as caught:
        limits.checked_path(ROOT_INODE + 1, b"a?b")
    assert caught.value.errno == errno.EINVAL


def key_limits(source_prefix: str = "", *, characters_refused: str = "") -> KeyLimits:
    """The limits of a store; the root directory, and one more, have prefixes."""
    capabilities = Capabilities(name="store", characters_refused=characters_refused)
    source = Source("s3", "bucket", source_prefix)
    return KeyLimits(lambda directory: "" if directory == ROOT_INODE else "directory/", capabilities, source)
