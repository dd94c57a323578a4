"""The report: its text follows the results, the worst first, and its plots are reproducible."""

from __future__ import annotations

from pathlib import Path

from scripts.bench import report, workloads
from scripts.bench.peers import CLASSES
from scripts.bench.results import Results
from scripts.bench.sizes import FULL, QUICK
from tests.bench.runs import COLD, WARM, failed, run


def full() -> Results:
    cold = {"lakefs": [90, 94, 92], "rclone": [100], "obstore": [300]}
    return run(cold, {"lakefs": [500], "rclone": [4], "local disk": [520]})


def section(text: str, head: str) -> str:
    return text.partition(f"## {head}\n")[2].partition("\n## ")[0]


def row_of(text: str, *cells: str) -> str:
    (row,) = [line for line in text.splitlines() if all(cell in line for cell in cells)]
    return row


def test_what_we_are_behind_in_comes_first() -> None:
    text = report.text_of(full(), "pictures")
    assert text.index("Where we are behind") < text.index("All workloads") < text.index(f"### {COLD.name}")
    behind = section(text, "Where we are behind")
    row = row_of(behind, "| rclone |")
    assert "0.92×" in row
    assert "92 get 3 list" in row, "the profile: what ours asked for in the last round"
    assert "upcalls 41 open 2 read" in row
    assert "0.31×" in row_of(behind, "| obstore |")
    assert "LOOKUP, OPEN and READ" in row_of(behind, "| obstore |")
    assert WARM.name not in behind, "0.96 of the disk is enough"


def test_nowhere_behind() -> None:
    text = report.text_of(run({"lakefs": [90], "rclone": [4], "obstore": [95]}), "pictures")
    assert "Nowhere, in this run." in section(text, "Where we are behind")


def test_a_row_has_the_numbers_of_the_results() -> None:
    text = report.text_of(full(), "pictures")
    row = row_of(text.partition(f"### {COLD.name}")[2].partition("\n### ")[0], "| lakefs |")
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:9] == ["lakefs", "46.0", "45.0 – 47.0", "3", "46.0", "46.0", "1.50", "12.25", "77.50"]
    assert cells[9:] == ["95", "1.0 / 0.0", "2,717.39", "43", "1.75", "96"]


def test_failures_and_limits_are_shown() -> None:
    found = full()
    failed(found, COLD, "s3fs", "does not mount: no | such bucket")
    text = report.text_of(found, "pictures")
    assert "failed in round 1: does not mount: no \\| such bucket" in row_of(text, "| s3fs |", "failed")
    found.quick = True
    assert "**This was a quick run" in report.text_of(found, "pictures")


def test_written_with_plots_that_do_not_change(tmp_path: Path) -> None:
    found = full()
    failed(found, COLD, "s3fs", "does not mount")
    stale = tmp_path / "one" / "gone.svg"
    stale.parent.mkdir()
    stale.write_text("a workload that is no more")
    for name in ("one", "two"):
        report.write(found, tmp_path / f"{name}.md")
    assert (tmp_path / "one.md").read_text().replace("(one/", "(two/") == (tmp_path / "two.md").read_text()
    plots = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert plots == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}
    assert set(plots) == {"first-epoch-4-readers.svg", "large-file-sequential-warm.svg"}
    picture = plots["first-epoch-4-readers.svg"].decode()
    assert "lakefs is 0.92× rclone, the best other mount" in picture
    assert "failed" in picture
    for name in plots:
        assert f"](one/{name})" in (tmp_path / "one.md").read_text()


def test_reasons_are_about_workloads_and_peers_that_there_are() -> None:
    names = [note.name for note in workloads.notes(FULL)]
    ours = {each.name for each in CLASSES if each.kind == "ours"}
    for each in report.reasons():
        assert any(name.startswith(each.workload) for name in names), each.workload
        assert set(each.ours) <= ours
        assert each.against
        assert {"mount", "client", "disk"}.issuperset(each.against)


def test_every_workload_is_in_a_group_and_has_a_name_of_its_own() -> None:
    for sizes in (FULL, QUICK):
        names = [note.name for note in workloads.notes(sizes)]
        assert len(set(names)) == len(names)
        assert {note.yardstick for note in workloads.notes(sizes)} == {"client", "disk"}
