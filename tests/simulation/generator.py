"""Makes plans from seeds: what users do on few names, so that they meet, and what befalls them.

What always holds: the same profile and seed make the same plan. Names of files begin with ``f``, of directories with
``d``, of links with ``l``.
"""

from __future__ import annotations

import random

from tests.simulation import plan as plans
from tests.simulation.directed import make_directed
from tests.simulation.plan import NodePlan, Plan, Round, Step

PROFILES = (
    "packs", "turns", "mixed", "writeback", "crash", "faulty", "power", "foreign", "copies", "names", "fleet",
    "directed",
)  # fmt: skip
OPERATIONS = 300
ROUND_OPERATIONS = 25
SIZES = (0, 1, 100, 3000, 20_000, 70_000, 300_000)
"""Bytes: packed, of one part, of several parts."""
SIZE_WEIGHTS = (1, 1, 4, 4, 3, 2, 1)
FAILPOINTS = (
    "accept.synced", "accept.recorded", "publish.begun", "publish.sent", "publish.noted", "commit.noted", "commit.sent",
    "rename.moved", "discard.begun", "apply.step",
)  # fmt: skip
KINDS = {
    "write": 30, "rename": 16, "rename_directory": 9, "unlink": 9, "read": 10, "list": 3, "mkdir": 3, "rmdir": 2,
    "symlink": 2, "chmod": 2, "xattr": 2, "truncate": 3, "exchange": 1,
}  # fmt: skip
"""Operations, and how often each is done beside the others."""
KINDS_BY_PROFILE = {
    "packs": {"admin": 4},
    "fleet": {"admin": 4, "ingest": 4, "rename_directory": 14, "mkdir": 10},
    "copies": {"link": 12, "clone": 12},
    "names": {
        "write": 24, "rename": 6, "rename_directory": 40, "unlink": 5, "read": 3, "mkdir": 9, "rmdir": 2, "symlink": 3,
        "chmod": 0, "xattr": 0, "exchange": 2, "exchange_directories": 6, "exchange_kinds": 4, "rename_free": 3,
        "rename_link": 3,
    },
}  # fmt: skip
"""Those of a profile that differ."""
CUTS_S = (2.0, 20.0, 120.0)
"""Shorter than `--delete-after`: what a node had acknowledged under write-back may be left out after that."""
FEW_DIRECTORIES = (["d0", "d1"], ["d0", "d1", "d1/d1"], ["d0", "d1", "d0/d0", "d1/d1"], ["d0", "d1", "d0/d1", "d1/d0"])
"""Of the profile ``names``: its nodes rename directories into each other's earlier names."""
FOREIGN_SHARE = 0.15
"""Of the operations of the profile ``foreign``, those of programs that know nothing of the lake."""
RESTART_FAILPOINTS = (
    "replay.restored", "replay.restored", "publish.begun", "publish.sent", "publish.noted", "commit.noted",
    "commit.sent", "discard.begun",
)  # fmt: skip
"""At which the next daemon of the profile ``fleet`` dies again, while it brings back what was acknowledged."""
AWAY_S = (100.0, 600.0)
"""For how long nodes of the profile ``fleet`` are cut off: also longer than polls look back, and than removed objects
stay."""
OPEN_S = (0.0, 0.2, 40.0, 150.0)
"""For how long users of the profile ``fleet`` wait between two pieces of a file that they write."""
AWAY_GRACE_S = 700.0
"""Of its `gc`: no node is away for longer."""
NODE_OFFSETS_S = (0.0, 0.0, 0.4, -0.9, 20.0, -30.0)


def make_plan(profile: str, seed: int, *, nodes: int = 3, operations: int = OPERATIONS) -> Plan:
    """The plan of a seed."""
    if profile == "directed":
        return make_directed(seed, nodes)
    return _Maker(profile, seed, nodes).plan(operations)


ANNOUNCED_PROFILES = frozenset({"turns", "mixed", "names"})
"""Nothing but mounts changes the lake, and none dies: announcements alone make nodes agree."""
ANNOUNCED_EVERY = 4
CLOSE_PATHS = ("d0/**", "d1/**", "f0", "**/f1", "**/d0/**")
"""Paths that some mounts under write-back store at once."""
CLOSE_PATHS_SHARE = 0.35


class _Maker:
    def __init__(self, profile: str, seed: int, nodes: int) -> None:
        self.profile, self.seed, self.nodes = profile, seed, nodes
        self.rng = random.Random(f"plan/{profile}/{seed}/{nodes}")
        self.latency_s = self.rng.choice([(0.001, 0.03), (0.001, 0.3), (0.02, 1.5)])
        self.content = 0
        self.contents: dict[str, list[tuple[int, int]]] = {}
        self.files = [f"f{number}" for number in range(4)]
        self.directories = ["d0", "d1", "d2", "d0/d0", "d1/d1"]
        self.links = ["l0", "l1"]
        self.new_directories = [*self.directories, "d3", "d4"]
        if profile == "names":
            self.files, self.directories = ["f0", "f1"], self.rng.choice(FEW_DIRECTORIES)
            self.links = ["l0", "d0/l0", "d1/l0"]
            self.new_directories = [*self.directories, *self.rng.choice([[], [], ["d2"]])]
        self.away: list[int] = []
        """Of a round of the profile ``fleet``: the nodes that joins, is cut off, and dies; the second does most."""
        self.there: set[str] = set()
        """Files that are there if every operation succeeds, one after another: most operations choose among them."""

    def plan(self, operations: int) -> Plan:
        rng, profile = self.rng, self.profile
        config: dict[str, object] = {
            "pack": {"packs": "always"}.get(profile) or rng.choice(["auto", "never", "never", "always"]),
            "refresh_s": 2.0,
            "metadata_ttl_s": rng.choice([2.0, 5.0]),
            "delete_after_s": rng.choice([150.0, 300.0]),
            "pack_threshold_bytes": 32_000,
            "staging_timeout_s": 60.0,
            "writeback_delay_s": rng.choice([0.2, 2.0]),
        }
        if profile == "writeback" or (
            profile in ("crash", "faulty", "turns", "foreign", "copies") and rng.random() < 0.4
        ):
            config["durability"] = "writeback"
        if profile == "power":
            config["durability"] = "writeback"
        if profile == "fleet":
            config |= {
                "refresh_s": rng.choice([2.0, 5.0]),
                "delete_after_s": 150.0,
                "durability": rng.choice(["close", "writeback", "writeback"]),
            }
        chance = random.Random(f"rules/{profile}/{self.seed}/{self.nodes}")
        if config.get("durability") == "writeback" and chance.random() < CLOSE_PATHS_SHARE:
            config["rules"] = [{"path": chance.choice(CLOSE_PATHS), "durability": "close"}]
        if profile in ANNOUNCED_PROFILES and self.seed % ANNOUNCED_EVERY == ANNOUNCED_EVERY - 1:
            config["metadata_ttl_s"] = 3600.0
        capabilities: dict[str, object] = {}
        if profile == "faulty":
            for name in ("put_if_absent", "complete_if_absent", "delete_if_match", "delete_many"):
                if rng.random() < 0.25:
                    capabilities[name] = False
        drifts = profile in ("faulty", "crash", "mixed")
        if profile == "turns":
            per_round, operations = 20, min(operations, 80)
        else:
            per_round = ROUND_OPERATIONS
        rounds = [
            self.round(min(per_round, operations - first), first == 0) for first in range(0, operations, per_round)
        ]
        return Plan(
            profile=profile,
            seed=f"{profile}/{self.seed}/{self.nodes}",
            nodes=tuple(
                NodePlan(
                    rng.choice(NODE_OFFSETS_S) if drifts else 0.0, rng.choice([0.0, 1e-4, -1e-4]) if drifts else 0.0
                )
                for _ in range(self.nodes)
            ),
            rounds=tuple(rounds),
            config=config,
            capabilities=capabilities,
            latency_s=self.latency_s,
            forgets=profile == "power",
            levels=profile == "fleet" and rng.random() < 0.7,
        )

    def round(self, count: int, is_first: bool) -> Round:
        rng = self.rng
        steps: list[Step] = []
        at_s = 0.0
        if is_first:
            for path in self.directories:
                steps.append(Step(at_s, 0, 0, plans.Mkdir(path=path)))
                at_s += 0.5
            at_s += 4.0
        if self.profile == "fleet":
            away = rng.sample(range(self.nodes), min(3, self.nodes))
            self.away = [*away, *away][:3]
        pace_s = rng.choice([0.5, 2.0, 12.0, 25.0] if self.profile == "fleet" else [0.05, 0.5, 2.0])
        for _ in range(count):
            at_s += rng.expovariate(1 / pace_s)
            if self.profile == "foreign" and rng.random() < FOREIGN_SHARE:
                steps.append(Step(round(at_s, 3), plans.NOBODY, 0, self.foreign_operation()))
                continue
            node = rng.choice([*range(self.nodes), *self.away[1:2]])
            steps.append(Step(round(at_s, 3), node, rng.randrange(2), self.operation()))
        steps += self.faults(at_s)
        quiet_s = rng.choice([12.0, 20.0]) + 8 * self.latency_s[1]
        return Round(tuple(sorted(steps, key=lambda step: step.at_s)), quiet_s)

    def existing(self) -> str:
        """A file that probably exists."""
        return self.rng.choice(sorted(self.there)) if self.there and self.rng.random() < 0.85 else self.file()

    def file(self) -> str:
        directory = self.rng.choice(["", *self.directories])
        return f"{directory}/{self.rng.choice(self.files)}" if directory else self.rng.choice(self.files)

    def size_and_content(self, path: str) -> tuple[int, int]:
        earlier = self.contents.setdefault(path, [])
        if earlier and self.rng.random() < 0.2:
            return self.rng.choice(earlier)
        self.content += 1
        earlier.append((self.content, self.rng.choices(SIZES, SIZE_WEIGHTS)[0]))
        return earlier[-1]

    def write(self) -> plans.Write:
        rng = self.rng
        how = rng.choices(["new", "exclusive", "append", "patch"], [8, 1, 2, 2])[0]
        path = self.existing() if how in ("append", "patch") or rng.random() < 0.3 else self.file()
        content, size = self.size_and_content(path)
        self.there.add(path)
        pieces = rng.choice([1, 1, 2, 4])
        pauses_s = OPEN_S if self.profile == "fleet" else (0.0, 0.0, 0.2, 3.0)
        return plans.Write(
            path=path, content=content, size=size, how=how, pieces=pieces,  # type: ignore[arg-type]
            pause_s=rng.choice(pauses_s) if pieces > 1 else 0.0, fsyncs=rng.random() < 0.15,
        )  # fmt: skip

    def operation(self) -> plans.AnyOp:
        rng = self.rng
        kinds = KINDS | KINDS_BY_PROFILE.get(self.profile, {})
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        match kind:
            case "write":
                return self.write()
            case "rename" | "exchange":
                old, new = self.existing(), self.existing() if kind == "exchange" else self.file()
                if kind == "rename":
                    self.moved(old, new)
                return plans.Rename(old=old, new=new, flags=2 if kind == "exchange" else 0)
            case "rename_directory":
                old, new = rng.choice(self.directories), rng.choice(self.new_directories)
                self.moved(old, new)
                return plans.Rename(old=old, new=new)
            case "exchange_directories":
                return plans.Rename(old=rng.choice(self.directories), new=rng.choice(self.directories), flags=2)
            case "exchange_kinds":
                old, new = self.existing(), rng.choice(self.directories)
                old, new = (old, new) if rng.random() < 0.5 else (new, old)
                return plans.Rename(old=old, new=new, flags=2)
            case "rename_free":
                return plans.Rename(old=self.existing(), new=self.file(), flags=1)
            case "rename_link":
                return plans.Rename(old=rng.choice(self.links), new=rng.choice([*self.links, self.file()]))
            case "link" | "clone":
                old, new = self.existing(), self.file()
                self.there.add(new)
                how = "link" if kind == "link" else rng.choice(["clone", "force"])
                return plans.Copy(old=old, new=new, how=how)  # type: ignore[arg-type]
            case "unlink":
                path = self.existing()
                self.there.discard(path)
                return plans.Unlink(path=path)
            case "read":
                path = self.existing()
                return plans.Read(path=path, pause_s=rng.choice([0.0, 0.0, 200.0]) if self.profile == "fleet" else 0.0)
            case "list":
                return plans.List(path=rng.choice(self.directories))
            case "mkdir":
                return plans.Mkdir(path=rng.choice(self.directories))
            case "rmdir":
                return plans.Rmdir(path=rng.choice(self.directories))
            case "symlink":
                return plans.Symlink(path=rng.choice(self.links), target=self.file())
            case "chmod":
                return plans.Chmod(path=self.existing(), mode=rng.choice([0o600, 0o640]))
            case "xattr":
                return plans.SetXattr(path=self.existing(), value=str(rng.randrange(100)))
            case "truncate":
                return plans.Truncate(path=self.existing(), size=rng.choice([0, 10, 5000, 100_000]))
            case "ingest":
                return self.ingest()
            case _:
                if self.profile == "fleet":
                    what = rng.choice(["maintenance", "maintenance", "gc", "gc", "snapshot"])
                    return plans.Admin(what=what, grace_s=AWAY_GRACE_S)  # type: ignore[arg-type]
                what = rng.choice(["gc", "gc", "pack", "unpack", "relocate", "snapshot", "fsck"])
                return plans.Admin(what=what, grace_s=rng.choice([5.0, 30.0]))  # type: ignore[arg-type]

    def ingest(self) -> plans.Ingest:
        """A small tree, into a directory that is there or not."""
        rng, directory = self.rng, self.rng.choice(self.directories)
        below = rng.sample([*self.files, *(f"d1/{name}" for name in self.files)], rng.choice([1, 2, 4]))
        files = []
        for name in sorted(below):
            path = f"{directory}/{name}"
            files.append((name, *self.size_and_content(path)))
            self.there.add(path)
        return plans.Ingest(path=directory, files=tuple(files))

    def foreign_operation(self) -> plans.AnyOp:
        """What a program does that puts and deletes plain objects in the store."""
        rng = self.rng
        path = self.existing() if rng.random() < 0.7 else self.file()
        if rng.random() < 0.35:
            self.there.discard(path)
            return plans.ForeignDelete(path=path)
        content, size = self.size_and_content(path)
        self.there.add(path)
        return plans.ForeignPut(path=path, content=content, size=size)

    def moved(self, old: str, new: str) -> None:
        """A file or a directory has another name."""
        for path in sorted(self.there):
            if path == old or path.startswith(old + "/"):
                self.there.discard(path)
                self.there.add(new + path[len(old) :])

    def faults(self, until_s: float) -> list[Step]:
        rng, found = self.rng, []

        def add(op: plans.AnyOp) -> None:
            found.append(Step(round(rng.uniform(0, until_s), 3), rng.randrange(self.nodes), -1, op))

        if self.profile in ("crash", "power"):
            for _ in range(rng.choice([1, 1, 2, 3])):
                failpoint = rng.choice(FAILPOINTS) if rng.random() < 0.5 else ""
                add(
                    plans.Kill(
                        down_s=rng.choice([0.5, 2.0, 10.0]),
                        failpoint=failpoint,
                        count=rng.choice([1, 1, 2, 3]),
                        loses_cache=self.profile == "crash" and not failpoint and rng.random() < 0.2,
                        power=self.profile == "power",
                    )
                )
        if self.profile == "fleet":
            found += self.absences(until_s)
        if self.profile == "faulty":
            for _ in range(rng.choice([1, 2, 3])):
                kind = rng.choice(["cut", "storm", "storm", "clock", "disk"])
                if kind == "cut":
                    add(plans.Cut(seconds=rng.choice(CUTS_S)))
                elif kind == "storm":
                    add(plans.Storm(
                        seconds=rng.choice([5.0, 60.0]), lost_request=rng.choice([0, 0.1]),
                        lost_answer=rng.choice([0.05, 0.3]), slow_down=rng.choice([0, 0.2]), late=rng.choice([0, 0.02]),
                    ))  # fmt: skip
                elif kind == "clock":
                    add(plans.ClockJump(seconds=rng.choice([-3600.0, -5.0, 5.0, 3600.0])))
                else:
                    add(plans.FillDisk(seconds=rng.choice([3.0, 30.0])))
        return found

    def absences(self, until_s: float) -> list[Step]:
        """One node joins in the middle of a round, one is cut off for long, one dies twice; not all in each round."""
        rng, found = self.rng, []
        joins, is_cut, dies = self.away
        if rng.random() < 0.6:
            found.append(Step(0.0, joins, -1, plans.Join(seconds=round(rng.uniform(0, 0.9 * until_s), 3))))
        if rng.random() < 0.7:
            at_s = round(rng.uniform(0, 0.3 * until_s), 3)
            found.append(Step(at_s, is_cut, -1, plans.Cut(seconds=round(rng.uniform(*AWAY_S), 1))))
        if rng.random() < 0.4:
            found.append(
                Step(
                    round(rng.uniform(0, until_s), 3), dies, -1,
                    plans.Kill(
                        down_s=rng.choice([0.5, 2.0, 10.0]),
                        failpoint=rng.choice(FAILPOINTS) if rng.random() < 0.3 else "",
                        again=rng.choice(RESTART_FAILPOINTS),
                    ),
                )
            )  # fmt: skip
        return found
