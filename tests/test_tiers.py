"""Which tier a test belongs to, and how many examples it takes there."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest

from tests import tiers
from tests.tiers import INTEGRATION_DIRECTORIES, INTEGRATION_MODULES, examples, is_integration, sized

TESTS = Path(__file__).parent


def test_tables_name_what_exists() -> None:
    assert all((TESTS / name).is_dir() for name in INTEGRATION_DIRECTORIES)
    assert all((TESTS / name).is_file() for name in INTEGRATION_MODULES)


@pytest.mark.parametrize(
    ("path", "fixtures", "parameters", "expected"),
    [
        ("vfs/test_names.py", ["tmp_path"], ["auto", 1], False),
        ("mount/test_names.py", ["tmp_path"], [], True),
        ("vfs/test_model.py", [], [], True),
        ("store/test_client.py", ["tmp_path", "faults"], [], True),
        ("store/test_contract.py", ["lake"], ["moto"], True),
        ("store/test_contract.py", ["lake"], ["local"], False),
    ],
)
def test_is_integration_by_directory_module_fixture_or_server(
    path: str, fixtures: list[str], parameters: list[object], expected: bool
) -> None:
    assert is_integration(PurePath(path), fixtures, parameters) == expected


@pytest.mark.parametrize(("is_long", "expected"), [(False, (3, 5)), (True, (40, 1000))])
def test_examples_in_a_long_run_are_ten_times_as_many(
    monkeypatch: pytest.MonkeyPatch, is_long: bool, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(tiers, "IS_LONG", is_long)
    assert (sized(3, 40), examples(100) if is_long else examples(20)) == expected
