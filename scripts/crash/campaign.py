"""Rounds of work, death, and comparison, on one lake after another.

A round: the daemon starts (perhaps told to die at a boundary), writers compare what is there with what they know and
go on writing, the daemon dies, what lies in the store is looked at as another program sees it. After some rounds the
lake is ended as a user would: flush, unmount, `gc`; and then a mount with an empty cache must show the model, and
nothing must be left over. Everything random follows from the seed, but the moments at which processes run do not.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from scripts.crash import harm
from scripts.crash.content import Ids
from scripts.crash.contest import Contest, is_contested, wait_right
from scripts.crash.disk import DiskError
from scripts.crash.host import Host, HostError
from scripts.crash.member import Answer, Begin, Check, CheckSightings, CheckStore, Crew, Go, Hot, Stop, WriteLog
from scripts.crash.store_view import DANGLING, StoreView
from scripts.crash.tree import Kind, Node, look
from scripts.crash.watcher import Watcher
from tests.servers import Server

FAILPOINT_WAIT_S = 2.5
"""How long the daemon may work on without reaching the boundary it was told to die at."""
FAILPOINT_COUNTS = (1, 1, 2, 3, 5, 8, 13)
"""The daemon dies when it comes to the boundary for this time."""
RANDOM_S_MAX = 1.2
STARTING_S_MAX = 1.3
CATCH_UP_S_MAX = 10.0
"""The other node looks for commits five times a second, and at listings once."""
SETTLE_S_MAX = 30.0
"""Nodes that live on store what was acknowledged, and hear of each other, within this."""
ALL_DIE = 0.4
"""How often all nodes die together; else one of them."""
REPLAY = "replay.restored"


class Failure(Exception):
    """Something acknowledged is not there, or something else is."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run does."""

    seed: str
    kills: int
    kills_per_lake: int
    durability: str
    failpoints: tuple[str, ...]
    harm: str = ""
    """What to break behind the daemon's back, to see that it is noticed; see `harm`."""
    harm_after: int = 6
    """Kills before that."""
    allow_dangling: bool = False
    """Count names whose bytes were replaced, instead of failing."""
    watch: bool = True
    """Every other lake of one mount has a second one, which is looked at all the time."""
    mounts: int = 1
    common_names: bool = True
    """A writer of each of several mounts changes names that the others change, too."""
    power_cuts: bool = False
    """Each death takes what was not synced to the disk of the cache directory."""


@dataclass(slots=True)
class Tally:
    """What was done, for the summary."""

    kills: int = 0
    lakes: int = 0
    steps: int = 0
    bytes_written: int = 0
    files_seen: int = 0
    sightings: int = 0
    early: int = 0
    dangling: int = 0
    cut_off: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)


class Lake:
    """One lake, from an empty bucket prefix to its end. Writer ``n`` works on node ``n % mounts``."""

    def __init__(self, plan: Plan, number: int, server: Server, bucket: str, directory: Path, crew: Crew,
                 tally: Tally) -> None:  # fmt: skip
        self._plan, self._number, self._crew, self._tally = plan, number, crew, tally
        self._random = random.Random(f"{plan.seed}/lake{number}")
        self.directory = directory / f"lake{number}"
        options = self._options()
        self.prefix = f"lake{number}/"
        self._source, self._server = f"s3://{bucket}/{self.prefix}".rstrip("/"), server
        self._hosts: list[Host] = []
        for node in range(plan.mounts):
            place = self.directory if plan.mounts == 1 else self.directory / f"node{node}"
            syncs = plan.harm != harm.UNSYNCED
            self._hosts.append(
                Host(server, self._source, place, *options, power_cuts=plan.power_cuts, syncs=syncs)
            )  # fmt: skip
        self._view = StoreView(server, bucket, self.prefix)
        self._unclosed: set[str] = set()
        self._watcher: Watcher | None = None
        if plan.watch and plan.mounts == 1 and number % 2 == 0:
            self._watcher = Watcher(server, self._source, self.directory / "other", f"{plan.seed}/watcher{number}")
        self.options = " ".join(options)
        self.rounds = 0
        self.kind = self.deaths = ""

    def _options(self) -> list[str]:
        choose = self._random.choice
        options = ["--durability", self._plan.durability, "--writeback-delay", choose(["0", "50ms", "300ms"])]
        options += ["--refresh", choose(["0.2", "1"])]
        options += ["--metadata-ttl", choose(["1", "60"] if self._plan.mounts == 1 else ["1", "5"])]
        options += [
            "--delete-after",
            choose(["0", "500ms", "60"]),
            "--pack",
            choose(["auto", "auto", "always", "never"]),
        ]
        return [*options, "--orphans", choose(["keep", "abort"]), "--staging-size", choose(["256M", "1G"])]

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher.host.close()
        for host in self._hosts:
            host.close()
            self._tally.cut_off += host.cut_off
        self._view.close()

    def _writers_of(self, *hosts: Host) -> list[int]:
        return [number for number in self._crew.numbers if self._hosts[number % len(self._hosts)] in hosts]

    @property
    def _living(self) -> list[Host]:
        return [host for host in self._hosts if host.pid]

    # -- one lake

    def run(self, kills: int) -> None:
        """Raises Failure, HostError, TimeoutError."""
        count, plan = len(self._hosts), self._plan
        self._crew.begin([
            Begin(
                f"{plan.seed}/lake{self._number}/{number}", self._hosts[number % count].mountpoint, plan.durability,
                mounts=count, contends=plan.common_names and number < count and count > 1, power_cuts=plan.power_cuts,
            )
            for number in self._crew.numbers
        ])  # fmt: skip
        first = self._hosts[0]
        first.start()
        first.wait_mounted()
        os.mkdir(first.mountpoint / "shared")
        first.flush()
        first.umount()
        if self._watcher is not None:
            self._watcher.start()
        before = self._tally.kills
        while self._tally.kills - before < kills:
            self._round(kills - (self._tally.kills - before))
            self.rounds += 1
        self._mount("", next(host for host in self._hosts if not host.pid))
        self._end()
        self._tally.lakes += 1

    def _round(self, kills_max: int) -> None:
        """Of all nodes those that died before are mounted, and one or all of them die."""
        before = self.kind
        self.kind = self._kind()
        kind = self.kind
        victim = self._random.choice([host for host in self._hosts if not host.pid])
        others = [host for host in self._hosts if host is not victim and self._random.random() < ALL_DIE]
        victims = [victim, *others][:kills_max]
        self.deaths = f"after {before or 'nothing'}, before {kind}, of {[self._hosts.index(each) for each in victims]}"
        self._mount(kind, victim)
        if kind == "wipe":
            self._work_until(victims, lambda: self._sleep(victim, RANDOM_S_MAX), stop_first=True)
        elif kind in self._plan.failpoints and kind != REPLAY:
            self._work_until(victims, lambda: self._await_failpoint(victim, kind))
        else:
            self._work_until(victims, lambda: self._sleep(victim, RANDOM_S_MAX))
        self._tally.kills += len(victims)
        self._tally.happened[kind] += 1
        for each in victims:
            each.clear()
        if kind == "wipe":
            shutil.rmtree(victim.cache)
        elif self._plan.harm in harm.HARMS and self._tally.kills >= self._plan.harm_after:
            harm.do(self._plan.harm, victim, self._view, self._random)  # of a flushed node nothing can be lost
        self._look_at_store()

    def _mount(self, kind: str, victim: Host) -> None:
        """Daemons that come to their mounts, and show what they must; perhaps after one, the ``victim``'s, that dies on
        the way there."""
        others = [host for host in self._hosts if not host.pid and host is not victim]
        for host in others:
            host.start()
        for host in others:
            host.wait_mounted()
        failpoint = f"{kind}:{self._random.choice(FAILPOINT_COUNTS)}" if kind in self._plan.failpoints else ""
        if kind == "starting":
            victim.start()
            victim.wait_died(self._random.random() * STARTING_S_MAX)
            victim.kill(cut_first=self._cuts_first())
            victim.clear()
        elif failpoint:
            victim.start(REPLAY if kind == REPLAY else failpoint)
            if victim.wait_mounted(may_die=True):
                try:
                    self._compare()
                    self._tally.missed[REPLAY] += kind == REPLAY
                    return
                except (Failure, OSError):  # also of the listing of a mount that dies just then
                    if not victim.wait_died(1.0):
                        raise
            victim.clear()
            self._look_at_store()
        victim.start()
        victim.wait_mounted()
        self._compare()

    def _kind(self) -> str:
        """How this round's daemon dies: each boundary in its turn, at random moments, while it replays, and after a
        flush with the loss of its cache directory."""
        number = self._number * self._plan.kills_per_lake + self.rounds
        if number % 2 and self._plan.failpoints:
            return self._plan.failpoints[number // 2 % len(self._plan.failpoints)]
        draw = self._random.random()
        return "wipe" if draw < 0.08 else "starting" if draw < 0.25 else "random"

    def _cuts_first(self) -> bool:
        """The disk may go a moment before the daemon, or with it."""
        return self._plan.power_cuts and self._random.random() < 0.5

    def _sleep(self, host: Host, seconds_max: float) -> None:
        if host.wait_died(self._random.random() ** 1.5 * seconds_max):
            raise HostError(f"the daemon died by itself:\n{host.tail()}")

    def _await_failpoint(self, host: Host, name: str) -> None:
        if not host.wait_died(FAILPOINT_WAIT_S):
            self._tally.missed[name] += 1

    def _work_until(self, victims: list[Host], wait: Callable[[], None], *, stop_first: bool = False) -> None:
        """Writers work, ``wait`` returns, the victims are dead; nobody is at work on the other nodes."""
        self._crew.send(Go())
        wait()
        if stop_first:
            self._take(self._stop())
            for host in victims:
                host.flush()
                host.kill()
            return
        for host in victims:
            if not host.has_died():
                host.kill(cut_first=self._cuts_first())
        answers = self._crew.answers(self._writers_of(*victims))
        living = self._writers_of(*(host for host in self._hosts if host not in victims))
        self._take([*answers, *self._stop(living)])

    def _stop(self, numbers: list[int] | None = None) -> list[Answer]:
        self._crew.send(Stop(), numbers)
        return [*self._crew.answers(numbers), *self._crew.answers(numbers)]

    # -- comparing

    def _take(self, answers: list[Answer]) -> list[Answer]:
        """Raises Failure where a writer has something to complain of."""
        for answer in answers:
            self._tally.steps += answer.steps
            self._tally.early += answer.early
            self._tally.bytes_written += answer.bytes_written
            self._unclosed.update(path for path in answer.unclosed if path)
        problems = [problem for answer in answers for problem in answer.problems]
        if problems:
            raise Failure("\n".join(problems))
        return answers

    def _compare(self, *, strict: bool = False, root: Path | None = None) -> None:
        """All mounts with what their own writers know, or the one at ``root`` with what all know."""
        answers = self._take(self._crew.ask(Check(strict, root)))
        roots = [root] if root is not None else [host.mountpoint for host in self._living]
        problems = [problem for each in roots for problem in self._compare_shared(each, answers, strict=strict)]
        problems += [f"{name} is there, and nobody made it" for each in roots for name in _strangers(each)]
        if problems:
            raise Failure("\n".join(problems))

    def _compare_shared(self, root: Path, answers: list[Answer], *, strict: bool) -> list[str]:
        if len(self._hosts) > 1:
            contest = Contest([change for answer in answers for change in answer.changes])
            allow = self._plan.allow_dangling
            wrong, unreadable = wait_right(contest, root, SETTLE_S_MAX, strict=strict, allow_unreadable=allow)
            self._tally.dangling += unreadable
            others = os.listdir(root / "shared")
            strangers = [name for name in others if not (name.startswith("w") or is_contested(f"shared/{name}"))]
            return wrong + [f"shared/{name} is there, and nobody made it" for name in strangers]
        hot = [each for answer in answers for each in answer.hot]
        names = {each.name for each in hot}
        problems = [
            problem for name in names for problem in _compare_hot(root, name, [h for h in hot if h.name == name])
        ]
        expected = {name.rpartition("/")[2] for name in names}
        strangers = [name for name in os.listdir(root / "shared") if not name.startswith("w") and name not in expected]
        return problems + [f"shared/{name} is there, and nobody made it" for name in strangers]

    def _look_at_store(self, *, strict: bool = False) -> None:
        """Nodes that live on may still be storing what their writers, who are at rest, did before."""
        deadline = time.monotonic() + SETTLE_S_MAX
        while True:
            try:
                self._look_at_store_once(strict=strict)
                break
            except Failure:
                if not self._living or time.monotonic() > deadline:
                    raise
            time.sleep(0.2)
        if self._watcher is not None:
            sightings = self._watcher.take()
            self._tally.sightings += len(sightings)
            self._take(self._crew.ask(CheckSightings(sightings)))

    def _look_at_store_once(self, *, strict: bool) -> None:
        seen = self._view.look()
        if self._plan.allow_dangling:
            seen = self._without_dangling(seen, strict=strict)
        self._tally.files_seen += len(seen)
        answers = self._take(self._crew.ask(CheckStore(seen, strict)))
        problems = [f"{path} in the store is {node}" for path, node in seen.items() if not _is_ours(path.split("/")[0])]
        if len(self._hosts) > 1:
            contest = Contest([change for answer in answers for change in answer.changes])
            shared = {path: contest.wrong(path, node) for path, node in seen.items() if is_contested(path)}
            problems += [f"{path} in the store {what}" for path, what in shared.items() if what]
        else:
            tried: set[tuple[str, Ids]] = {each for answer in answers for each in answer.hot_tried}
            for path, node in seen.items():
                if path.startswith("shared/hot-") and (path, node.content) not in tried:
                    problems.append(f"{path} in the store is {node}, which nobody renamed to it")
        if problems:
            raise Failure("\n".join(problems))

    def _without_dangling(self, seen: dict[str, Node], *, strict: bool) -> dict[str, Node]:
        """Names whose bytes were replaced in place are counted; of several nodes those that all of them change."""
        dangling = {path for path, node in seen.items() if node.damage.startswith(DANGLING)}
        if len(self._hosts) > 1:
            dangling = {path for path in dangling if is_contested(path)}
        elif strict:
            return seen
        self._tally.dangling += len(dangling)
        places = {path.rpartition("/")[0] for path in dangling}
        return {
            path: node
            for path, node in seen.items()
            if path not in dangling and (path.rpartition("/")[0] not in places or not _is_group(path))
        }

    # -- the end

    def _end(self) -> None:
        """Flush, unmount, collect garbage; then another node with nothing in its cache, and the store itself."""
        self._crew.send(Go())
        self._sleep(self._hosts[0], RANDOM_S_MAX)
        self._take(self._stop())
        for host in self._hosts:
            host.flush()
            self._check_orphans(host)
        self._compare_nodes()
        for host in self._hosts:
            host.umount()
        self._look_at_store(strict=True)
        self._compare_watcher()
        for host in self._hosts:
            if left := os.listdir(host.cache / "staging"):
                raise Failure(f"after umount there is in staging: {left}\n{host.tail()}")
        first = self._hosts[0]
        gc = ["gc", self._source, "--endpoint-url", self._server.url, "--region", "us-east-1"]
        for _ in range(2):
            done = first.cli(*gc, "--grace", "0", "--uploads-older-than", "0")
            if done.returncode:
                raise Failure(f"gc: {done.stderr}{done.stdout}")
        if left := self._view.uploads():
            raise Failure(f"unfinished uploads are left in the store: {left}")
        first.cache = self.directory / "cache-of-another-node"
        first.start()
        first.wait_mounted()
        self._compare(strict=True, root=first.mountpoint)
        first.umount()
        if complaints := [each for host in self._hosts for each in host.complaints()]:
            raise Failure("\n".join(complaints))

    def _compare_nodes(self) -> None:
        """Each of several mounts shows what the writers of all have done."""
        for host in self._hosts if len(self._hosts) > 1 else ():
            self._wait_equal(host.mountpoint, SETTLE_S_MAX)

    def _compare_watcher(self) -> None:
        """The mount that was there all the time catches up."""
        if self._watcher is None:
            return
        self._watcher.stop()
        self._wait_equal(self._watcher.host.mountpoint, CATCH_UP_S_MAX)
        self._watcher.host.umount()
        if complaints := self._watcher.host.complaints():
            raise Failure("\n".join(complaints))

    def _wait_equal(self, root: Path, seconds_max: float) -> None:
        deadline = time.monotonic() + seconds_max
        while True:
            try:
                return self._compare(strict=True, root=root)
            except Failure as failure:
                if time.monotonic() > deadline:
                    raise Failure(f"at {root}, {seconds_max:.0f} s after the last change:\n{failure}") from None
            time.sleep(0.2)

    def _check_orphans(self, host: Host) -> None:
        """Only what nobody closed may be one; then they are aborted."""
        statistics = host.statistics()
        unfinished = statistics["unfinished"]
        assert isinstance(unfinished, list)
        for item in unfinished:
            if item["id"] == "names":
                continue  # the daemon's own: a renamed object was copied to its new key just now
            if item["state"] != "orphan" or item["path"] not in self._unclosed:
                raise Failure(f"after a flush, {item} is not durable, and it was closed")
        writeback = statistics.get("writeback")
        if isinstance(writeback, dict):
            others = len(self._hosts) > 1  # of names that all nodes change both versions may be kept
            if writeback.get("failed") or (writeback.get("conflicts") and not others):
                raise Failure(f"nobody else wrote to this lake, and nothing failed, but write-back tells {writeback}")
        done = host.cli("orphans", str(host.mountpoint), "--all", "abort")
        if done.returncode:
            raise Failure(f"orphans --all abort: {done.stderr}")

    def keep_evidence(self) -> None:
        """After a failure: what the writers did, and no process."""
        try:
            self._crew.ask(WriteLog(self.directory))
        except (TimeoutError, EOFError, OSError):
            pass


def _is_group(path: str) -> bool:
    return "/turns/" in path or "/ckpt-" in path


def _strangers(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if not _is_ours(name)]


def _is_ours(name: str) -> bool:
    return name == "shared" or (name[:1] == "w" and name[1:].isdecimal())


def _compare_hot(root: Path, name: str, writes: list[Hot]) -> list[str]:
    """A name that all rename onto has the version of a rename that no other one came after."""
    try:
        node = look(root, name)
    except OSError as error:
        return [f"{name}: {error}; it had {len(writes)} versions"]
    allowed = [each for each in writes if not any(other.began_ns > each.ended_ns for other in writes)]
    if node.damage or node.kind is not Kind.FILE or node.content not in [each.content for each in allowed]:
        versions = "\n".join(f"      {h.began_ns / 1e9:.6f} to {h.ended_ns / 1e9:.6f} {list(h.content)}"
                             for h in sorted(writes, key=lambda each: each.began_ns)[-20:])  # fmt: skip
        return [
            f"{name} is {node}; the newest version must be one of {[list(h.content) for h in allowed]}:\n{versions}"
        ]
    return []


def run(
    plan: Plan, server: Server, bucket: str, directory: Path, crew: Crew, say: Callable[[str], None]
) -> tuple[Tally, int]:
    """All lakes; how many of them failed. A lake that failed is left as it is, with its directories."""
    tally, failures, number = Tally(), 0, 0
    started = time.monotonic()
    while tally.kills < plan.kills and failures < 3:
        before = tally.kills
        lake = Lake(plan, number, server, bucket, directory, crew, tally)
        lake_kills = min(plan.kills_per_lake, plan.kills - tally.kills)
        try:
            lake.run(lake_kills)
        except (Failure, HostError, DiskError, TimeoutError, subprocess.TimeoutExpired) as error:
            failures += 1
            lake.keep_evidence()
            where = f"seed {plan.seed}, lake {number} ({lake.options}), round {lake.rounds} ({lake.deaths})"
            say(f"FAILED: {where}\n{error}")
            say(f"kept: {lake.directory}")
            return tally, failures
        finally:
            lake.close()
        shutil.rmtree(lake.directory)
        took = time.monotonic() - started
        say(f"lake {number}: {tally.kills - before} kills, {tally.kills} in all, {took:.0f} s; {lake.options}")
        number += 1
    return tally, failures
