"""The command of the benchmarks: reports, exit codes and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench import results
from scripts.bench.__main__ import main
from tests.bench.runs import COLD, failed, run


@pytest.mark.parametrize(("peer", "code"), [("lakefs", 1), ("s3fs", 0)])
def test_a_failure_of_ours_is_an_exit_code(tmp_path: Path, peer: str, code: int) -> None:
    found = run({"rclone": [3]})
    failed(found, COLD, peer, "does not mount")
    results.save(found, tmp_path / "r.json")
    assert main(["--from", str(tmp_path / "r.json"), "--report", str(tmp_path / "report.md")]) == code
    assert f"| {peer} |" in (tmp_path / "report.md").read_text()


def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--peers", "nobody"], ["--only", "nothing"], ["--repeats", "0"], ["--minutes", "0"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "--repeats must be 1 or more" in told
    assert "--minutes must be more than 0" in told


def test_results_that_are_not_there() -> None:
    with pytest.raises(SystemExit, match="no results"):
        main(["--from", "/nowhere/results.json"])
