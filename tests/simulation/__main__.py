"""The commands behind `make simulate`, `make simulate-one` and `make simulate-mutants`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click

import lakefs_fuse
from tests.simulation import plan as plans
from tests.simulation import scheduler
from tests.simulation.generator import PROFILES, make_plan
from tests.simulation.mutant import Mutant, apply, load_mutants
from tests.simulation.runs import Result, Seed, run_all, run_seed
from tests.simulation.shrink import shrink
from tests.simulation.simulation import Outcome, simulate

LEDGER_HEAD = """# Ledger of the simulation

A line for each slice: `python -m tests.simulation run --ledger docs/simulation_ledger.md`, see
[internals/simulation.md](internals/simulation.md).

| commit | profile | nodes | seeds | operations | virtual hours | known defects met | failures |
|---|---|---|---|---|---|---|---|
"""
POLLS = (": list ", ": get ")
NODES = 3
NODES_RANGE = click.IntRange(2, 6)


@click.group()
def main() -> None:
    """Simulate many nodes of a lake in one process."""
    scheduler.require_fixed_hashes("tests.simulation")


@main.command()
@click.option("--seeds", default=20, show_default=True, help="Seeds of each profile.")
@click.option("--first", default=0, show_default=True, help="The first seed.")
@click.option(
    "--profile",
    type=click.Choice(["", *PROFILES]),
    default="",
    help="One profile; all by default.",
)
@click.option("--nodes", type=NODES_RANGE, default=NODES, show_default=True, help="How many nodes share the lake.")
@click.option("--seconds", type=float, help="Start no seed after so long.")
@click.option("--ledger", type=click.Path(dir_okay=False, path_type=Path), help="Append a line for each profile.")
@click.option("--max-failures", default=10, show_default=True, help="Failures that are printed for each profile.")
def run(
    seeds: int, first: int, profile: str, nodes: int, seconds: float | None, ledger: Path | None, max_failures: int
) -> None:
    """Run seeds of profiles; exit with 1 where one failed."""
    failed = False
    for name in [profile] if profile else PROFILES:
        results = []
        for result in run_all([Seed(name, first + at, nodes) for at in range(seeds)], seconds):
            results.append(result)
            if result.failure and sum(bool(each.failure) for each in results) <= max_failures:
                click.echo(f"FAILED {result.seed}\n    {result.failure[:300]}")
        failed = _report(name, results, ledger) or failed
        if len(results) < seeds:
            click.echo(f"stopped: go on with PROFILE={name} FIRST={first + len(results)}")
    sys.exit(failed)


def _report(profile: str, results: list[Result], ledger: Path | None) -> bool:
    """Print a summary of a profile; whether a seed failed."""
    counts: dict[str, Counter[str]] = {}
    for result in results:
        for title, counter in result.counts.items():
            counts.setdefault(title, Counter()).update(counter)
    failures = sum(bool(result.failure) for result in results)
    hours = sum(result.virtual_s for result in results) / 3600
    cpu_s = sum(result.cpu_s for result in results) / max(1, len(results))
    click.echo(
        f"{profile}: {len(results)} seeds, {failures} failed, {hours:,.1f} virtual hours, {cpu_s:.2f} CPU s a seed"
    )
    for title, counter in counts.items():
        click.echo(f"  {title}: {', '.join(f'{name} {count:,}' for name, count in sorted(counter.items()))}")
    if ledger is not None and results:
        _append(ledger, profile, results, hours, sum(counts["known defects"].values()), failures)
    return failures > 0


def _append(ledger: Path, profile: str, results: list[Result], hours: float, known: int, failures: int) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not ledger.exists():
        ledger.write_text(LEDGER_HEAD)
    seeds = f"{results[0].seed.number} to {results[-1].seed.number}"
    steps = sum(result.steps for result in results)
    with ledger.open("a") as file:
        file.write(
            f"| {commit} | {profile} | {results[0].seed.nodes} | {seeds} | {steps:,} | {hours:,.1f} | {known:,} "
            f"| {failures} |\n"
        )


@main.command()
@click.option("--seed", default=0, show_default=True, help="The seed.")
@click.option("--profile", type=click.Choice(PROFILES), default="mixed", show_default=True)
@click.option("--nodes", type=NODES_RANGE, default=NODES, show_default=True)
@click.option("--plan", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A kept plan.")
@click.option("--polls", is_flag=True, help="Print LIST and GET, too.")
@click.option("--strict", is_flag=True, help="Known defects are failures.")
@click.option("--shrink", "target", type=click.Path(dir_okay=False, path_type=Path), help="Shrink it into this file.")
def one(seed: int, profile: str, nodes: int, path: Path | None, polls: bool, strict: bool, target: Path | None) -> None:
    """Run one seed, or a kept plan, and print what each node and the store did."""
    plan = plans.load(path) if path is not None else make_plan(profile, seed, nodes=nodes)
    if target is not None:
        plan, runs = shrink(plan, lambda some: simulate(some, is_strict=strict).failure)
        target.write_bytes(plans.dump(plan))
        click.echo(f"{plan.steps} steps are left after {runs} runs: {target}")
    outcome = simulate(plan, is_tracing=True, is_strict=strict)
    for line in outcome.history:
        if polls or not any(poll in line for poll in POLLS):
            click.echo(line)
    click.echo(_verdict(outcome))
    sys.exit(bool(outcome.failure))


def _verdict(outcome: Outcome) -> str:
    known = f" (known defects: {dict(outcome.known)})" if outcome.known else ""
    return f"FAILED {outcome.failure}" if outcome.failure else f"passed{known}"


@main.command()
@click.option("--seeds", default=50, show_default=True, help="Seeds of its profile in which each has to be found.")
@click.option("--name", default="", help="One mutant, as its file is named; all of them by default.")
@click.option("--profile", default="", help="Only mutants of this profile.")
def mutants(seeds: int, name: str, profile: str) -> None:
    """Find each mutant; exit with 1 where one was not found."""
    missed = 0
    for mutant in load_mutants():
        if (name and mutant.name != name) or (profile and mutant.profile != profile):
            continue
        found = _find(mutant, seeds)
        click.echo(f"{mutant.name:60} {mutant.profile:10} {found or f'not found in {seeds} seeds'}")
        missed += not found
    sys.exit(missed > 0)


def _find(mutant: Mutant, seeds: int) -> str:
    """Which seed finds a mutant; a seed that fails without it does not count. Empty where none does."""
    with tempfile.TemporaryDirectory() as directory:
        apply(mutant, Path(directory))
        command = [sys.executable, "-m", "tests.simulation", "failing", mutant.profile, str(seeds), directory]
        with subprocess.Popen(
            command,
            cwd=directory,  # which `python -m` searches first
            env=os.environ | {"PYTHONPATH": f"{directory}:{os.getcwd()}"},
            stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                number, _, failure = line.strip().partition(" ")
                if not run_seed(Seed(mutant.profile, int(number), NODES)).failure:
                    process.terminate()
                    return f"found by seed {number}: {failure[:100]}"
        if process.returncode:
            raise click.ClickException(f"{mutant.name} could not be run")
    return ""


@main.command(hidden=True)
@click.argument("profile")
@click.argument("seeds", type=int)
@click.argument("directory")
def failing(profile: str, seeds: int, directory: str) -> None:
    """Print the seeds at which the program in ``directory`` fails."""
    if not str(lakefs_fuse.__file__).startswith(directory):
        raise click.ClickException("the mutant is not what runs")
    for number in range(seeds):
        if failure := run_seed(Seed(profile, number, NODES)).failure:
            click.echo(f"{number} {failure}".replace("\n", " "))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
