"""Which checkpoints are complete, in which order they came, and which may go: from names and sizes alone."""

from __future__ import annotations

import pytest

from lakefs_fuse.checkpoints.model import NS, Listing, Pruning, Seen, choose, is_checkpoint, make_listing
from lakefs_fuse.checkpoints.names import is_checkpoint_file, looks_temporary, step_of, steps_order

NOW_S = 1_000_000


def seen(
    name: str,
    age_s: float = 100,
    *,
    is_dir: bool = True,
    state: str = "durable",
    file: str = "shard.bin",
    **more: object,
) -> Seen:
    item = Seen(name=name, is_dir=is_dir, **more)  # type: ignore[arg-type]
    item.add(file, 10, int((NOW_S - age_s) * NS), state)
    return item


def listing(*items: Seen, marker: str | None = None, match: str | None = None) -> Listing:
    return make_listing("/lake/ckpt/", items, marker=marker, match=match, now_ns=NOW_S * NS)


def names(found: Listing) -> list[str]:
    return [item.name for item in found.checkpoints]


def reasons(found: Listing) -> dict[str, str]:
    return {item.name: item.reason for item in found.checkpoints}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step100", 100), ("step_00100.pt", 100), ("checkpoint-500", 500), ("epoch=3-step=1200.ckpt", 1200),
        ("step=7-loss=0.25.ckpt", 7), ("global_step1000", 1000), ("iter_0000100", 100), ("model_0001.pth", 1),
        ("best.pt", None), ("best.pt2", None), ("2024-01-31", 31), ("v2", 2), ("Step-9", 9), ("misstep3-4", 4),
        ("run-1.safetensors", 1), ("x" + "9" * 40, 9999),
    ],
)  # fmt: skip
def test_the_step_of_a_name(name: str, step: int | None) -> None:
    assert step_of(name) == step


@pytest.mark.parametrize(
    ("given", "newest_last"),
    [
        (["step9", "step10", "step100.pt"], ["step9", "step10", "step100.pt"]),
        (["2024-02-01", "2024-01-31"], ["2024-01-31", "2024-02-01"]),
        (["e10-b1.pt", "e9-b40.pt"], ["e9-b40.pt", "e10-b1.pt"]),
        (["best-step3", "step4"], ["best-step3", "step4"]),
        (["1.pt", "2"], ["1.pt", "2"]),
        (["a1", "b2"], None),
        (["best.pt", "step1.pt"], None),
        (["best.pt", "last.pt"], None),
    ],
)
def test_the_order_of_names(given: list[str], newest_last: list[str] | None) -> None:
    keys = steps_order(given)
    if newest_last is None:
        assert keys is None
    else:
        assert keys is not None
        assert sorted(given, key=dict(zip(given, keys, strict=True)).__getitem__) == newest_last


def test_names_of_what_is_not_finished() -> None:
    temporary = (".step1", "tmp-step1", "_tmp1", "1.tmp", "a.pt.partial", "b.incomplete", "5.orbax-checkpoint-tmp-9")
    assert all(looks_temporary(name) for name in temporary)
    assert not any(looks_temporary(name) for name in ("step1", "attempt", "model.pt", "a.tmp.pt"))


def test_which_names_count() -> None:
    assert all(map(is_checkpoint_file, ("a.pt", "A.PT", "a.ckpt", "m.safetensors", "a.pt.tmp")))
    assert not any(map(is_checkpoint_file, ("config.json", "latest", ".pt", "log.txt", "SHA256SUMS")))
    assert is_checkpoint("anything", None, is_dir=True)
    assert is_checkpoint("state-1.json", "state-*.json", is_dir=False)
    assert not is_checkpoint("a.pt", "state-*", is_dir=False)


def test_by_steps_where_all_have_one_else_by_time() -> None:
    by_step = listing(seen("step2", 5), seen("step10", 50), seen("step9", 1))
    assert (names(by_step), by_step.order, by_step.latest) == (["step10", "step9", "step2"], "step", "step10")
    by_time = listing(seen("best.pt", 5, is_dir=False), seen("step10", 50), seen("step9", 1))
    assert (names(by_time), by_time.order, by_time.latest) == (["step9", "best.pt", "step10"], "mtime", "step9")
    # A temporary name among them does not change how the others are ordered.
    mixed = listing(seen("step2", 5), seen("step10", 50), seen("tmpabc", 1))
    assert (mixed.order, mixed.latest) == ("step", "step10")


def test_why_something_is_incomplete() -> None:
    empty = Seen(name="step5", is_dir=True)
    found = listing(
        seen("step1"), seen("step2.tmp"), seen("step3", state="uploading"),
        seen("step4.pt", state="dirty", is_dir=False), empty, seen(".pruned-step0-abcd"),
    )  # fmt: skip
    assert reasons(found) == {
        "step1": "",
        "step2.tmp": "the name is a temporary one",
        "step3": "not in the store yet (1 uploading)",
        "step4.pt": "not in the store yet (dirty)",
        "step5": "no files",
        ".pruned-step0-abcd": "being deleted",
    }
    assert found.latest == "step1"
    assert found.newest is not None
    assert found.newest.name == "step1"
    (item,) = (each for each in found.checkpoints if each.name == "step3")
    assert (item.where, item.state, item.path, item.kind) == ("node", "uploading", "/lake/ckpt/step3", "directory")


def test_directory_in_which_nothing_looks_like_a_checkpoint_is_none() -> None:
    source = seen("src", age_s=1, file="train.py")
    assert listing(source).newest is None
    assert "--match" in reasons(listing(source))["src"]
    assert listing(source, seen("final", file="model.safetensors")).latest == "final"
    assert listing(source, match="s*").latest == "src"
    assert listing(seen("1000", file="manifest.ocdbt")).latest == "1000"
    assert listing(seen("export", file="part", markers={"_SUCCESS"}), source).latest == "export"


def test_a_marker_is_expected_where_any_has_one_or_one_is_asked_for() -> None:
    items = (seen("step1", markers={"_SUCCESS"}), seen("step2"), seen("step3.pt", is_dir=False))
    assert reasons(listing(*items)) == {"step1": "", "step2": "no _SUCCESS", "step3.pt": ""}
    assert reasons(listing(seen("step1"), seen("step2"))) == {"step1": "", "step2": ""}
    assert reasons(listing(seen("step1"), marker="DONE")) == {"step1": "no DONE"}
    assert reasons(listing(seen("step1", markers={"DONE"}), marker="DONE")) == {"step1": ""}


def chosen(found: Listing, **pruning: object) -> list[str]:
    return [item.name for item in choose(found, Pruning(**pruning))]  # type: ignore[arg-type]


def test_the_oldest_go_and_the_newest_complete_one_never() -> None:
    found = listing(*(seen(f"step{step}", age_s=100 - step) for step in range(1, 6)))
    assert chosen(found, keep=2) == ["step1", "step2", "step3"]
    assert chosen(found, keep=9) == []
    assert chosen(found, older_than_s=0) == ["step1", "step2", "step3", "step4"]
    assert chosen(found, older_than_s=97.5) == ["step1", "step2"]
    assert chosen(found, keep=4, older_than_s=97.5) == ["step1"]
    assert chosen(found, keep=2, older_than_s=1000) == []


def test_what_is_incomplete_goes_only_if_asked_for_and_old() -> None:
    found = listing(
        seen("step1.tmp", 90), seen("step2", 80), seen("step3.tmp", 70), seen("step4", 60), seen("step5.tmp", 50),
        seen(".pruned-step0-00", 40),
    )  # fmt: skip
    assert set(chosen(found, keep=1)) == {".pruned-step0-00", "step2"}
    assert set(chosen(found, keep=1, incomplete=True)) == {".pruned-step0-00", "step1.tmp", "step2", "step3.tmp"}
    assert chosen(listing(seen("step1.tmp"), seen("step2.tmp")), keep=1, incomplete=True) == []


def test_what_is_spared() -> None:
    linked = seen("step1")
    linked.linked = True
    found = listing(linked, seen("step2", state="failed"), seen("step3"), seen("step4"))
    assert chosen(found, keep=1) == ["step3"]
    unnumbered = listing(seen("best.pt", 50, is_dir=False), seen("logs", 1), seen("step1", 40), seen("step2", 30))
    assert unnumbered.latest == "logs"
    assert chosen(unnumbered, keep=1) == ["step1"]
    assert chosen(unnumbered, keep=2, any_name=True) == ["best.pt", "step1"]
