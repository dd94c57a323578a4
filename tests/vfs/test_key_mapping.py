"""Which keys are names, and which names are keys."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.product import PLACEHOLDER
from lakefs_fuse.vfs.namespace.key_mapping import (
    KEY_BYTES_MAX,
    Hidden,
    checked_key,
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
    assert checked_key("a/" * 500, "x" * 24) == "a/" * 500 + "x" * 24
    for prefix, component, source in (("a/" * 500, "x" * 25, 0), ("a/" * 500, "é" * 13, 0), ("", "x", KEY_BYTES_MAX)):
        with pytest.raises(FileError) as caught:
            checked_key(prefix, component, source)
        assert caught.value.errno == errno.ENAMETOOLONG
