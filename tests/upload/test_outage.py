"""A store that is away, as the parts of one file meet it."""

from __future__ import annotations

import pytest

from lakefs_fuse.errors import StoreError, Unavailable
from lakefs_fuse.upload.uploader import Outage


def fail(outage: Outage, error: Exception, *, in_background: bool = True) -> None:
    with pytest.raises(type(error)) as caught, outage.asking(in_background=in_background):
        raise error
    assert caught.value is error


def test_one_part_asks_and_the_others_fail_with_the_known_error() -> None:
    ended = list[bool]()
    outage, away = Outage(lambda: ended.append(True)), Unavailable("away")
    fail(outage, away)
    with outage.asking(in_background=True):
        with pytest.raises(Unavailable) as caught, outage.asking(in_background=True):
            raise AssertionError("it asked, too")
        assert caught.value is away
        fail(outage, Unavailable("away still"), in_background=False)  # `publish` asks whatever others do
        assert (str(outage.error), ended) == ("away still", [])
    assert (outage.error, ended) == (None, [True])


def test_a_store_that_refuses_a_part_is_back() -> None:
    """The other parts wait no longer: their own attempts say what becomes of the file."""
    ended = list[bool]()
    outage = Outage(lambda: ended.append(True))
    fail(outage, StoreError("not this one"))
    assert not ended
    fail(outage, Unavailable("away"))
    fail(outage, StoreError("not this one"))
    assert (outage.error, ended) == (None, [True])
