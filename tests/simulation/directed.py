"""Directed workloads: rounds that aim at one sequence of events each, with the actors, sizes and delays drawn.

Random work on few names meets most of what can go wrong between two operations, and little of what takes three nodes
and a slow request. Each scenario here states the sequence that it aims at; a seed explores the interleavings around it.

What always holds: the same profile and seed make the same plan. A scenario uses names of its own. What its sequence
needs is made in a round before it, so every node has seen it, and has just listed everything, when the sequence begins.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.simulation import plan as plans
from tests.simulation.plan import NodePlan, Plan, Round, Step

ROUNDS = (7, 9)
PACK_THRESHOLD_BYTES = 32_000
PACKED = (100, 3000, 20_000)
PLAIN = (40_000, 50_000, 60_000)
"""Bytes: one PUT."""
LARGE = (150_000, 220_000, 300_000)
"""Bytes: several parts."""
GATHER_S, DOUBT_S = 1.5, 1.0
"""See `wiring.COMMIT_S_MAX` and `poller.DOUBT_S_MAX`: they say when a renamed object is looked at."""
JOURNAL_S = 1.0
"""How long a removal is gathered with others, see `committer`."""
DELETE_AFTER_S = 20.0
"""Longer than a node of these workloads takes to hear of a removal, with requests as slow as they make them."""
POLL_WINDOW_S = 120.0
"""See `hybrid_clock.WINDOW_NS`."""
RETRY_S = 60.0
"""See `node.RETRY_TIMEOUT_S`."""


@dataclass
class Script:
    """A round in the making, and what its scenario draws from. Times are offsets from the start of the round."""

    rng: random.Random
    nodes: int
    number: int
    config: dict[str, object]
    content: int
    before: list[Round] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    quiet_s: float = 12.0

    @property
    def ttl_s(self) -> float:
        return float(str(self.config["metadata_ttl_s"]))

    @property
    def refresh_s(self) -> float:
        return float(str(self.config["refresh_s"]))

    @property
    def heard_s(self) -> float:
        """After a change every node has heard of it."""
        return 2 * (self.refresh_s + GATHER_S + DOUBT_S)

    def name(self, letter: str) -> str:
        """A name of this round's own."""
        return f"{letter}{self.number}"

    def actors(self) -> list[int]:
        """All nodes, in an order of chance."""
        return self.rng.sample(range(self.nodes), self.nodes)

    def between(self, low: float, high: float) -> float:
        return round(self.rng.uniform(low, high), 3)

    def new(self, path: str, sizes: Sequence[int], **how: object) -> plans.Write:
        """A write of bytes that nobody wrote before."""
        self.content += 1
        return plans.Write(path=path, content=self.content, size=self.rng.choice(sizes), **how)  # type: ignore[arg-type]

    def do(self, at_s: float, node: int, op: plans.AnyOp, user: int = 0) -> None:
        if isinstance(op, plans.FAULTS):
            user = -1
        self.steps.append(Step(round(max(0.0, at_s), 3), node, user, op))

    def prepare(self, node: int, *ops: plans.AnyOp) -> float:
        """Do these in a round before; answers when the sequence begins: anywhere between two polls and two listings."""
        steps = tuple(Step(round(0.2 * number, 3), node, 0, op) for number, op in enumerate(ops))
        self.before.append(Round(steps, round(1.5 + self.ttl_s + self.refresh_s, 3)))
        return self.between(0.3, 0.3 + self.ttl_s + self.refresh_s)

    def slow(self, at_s: float, node: int, seconds: float, slow_s: float, *kinds: str, answer_s: float = 0.0) -> None:
        """Requests of these kinds take longer."""
        self.do(at_s, node, plans.Storm(seconds=seconds, slow_s=slow_s, slow_answer_s=answer_s, kinds=kinds))

    def rounds(self) -> list[Round]:
        steps = tuple(sorted(self.steps, key=lambda step: step.at_s))
        return [*self.before, Round(steps, round(self.quiet_s, 3))]


Scenario = Callable[[Script], None]


def overtaken_commit(do: Script) -> None:
    """The PUT of A's commit is slow; B, which cannot know of it, commits something later, which C sees first. It is
    about the same file, its name or its directory, or about another one."""
    a, b, *_ = do.actors()
    d, e = do.name("d"), do.name("e")
    f, g, h = f"{d}/f", f"{d}/g", f"{d}/h"
    at_s = do.prepare(a, plans.Mkdir(path=d), do.new(f, PACKED), do.new(g, PACKED))
    slow_s = do.between(2.5, 7.0)
    do.slow(at_s - 0.1, a, 2.0, slow_s, "put")
    write, unlink, away = do.new(f, PACKED), plans.Unlink(path=f), plans.Rename(old=f, new=h)
    pairs: list[tuple[plans.AnyOp, list[plans.AnyOp]]] = [
        (do.new(f, PACKED), [write]),
        (do.new(h, PACKED), [write, unlink]),
        (plans.Rename(old=d, new=e), [write, write, unlink, away]),
        (plans.Rename(old=g, new=f), [write, unlink, unlink]),
    ]
    first, seconds = do.rng.choice(pairs)
    do.do(at_s, a, first)
    do.do(at_s + do.between(0.1, 1.5), b, do.rng.choice(seconds))
    do.quiet_s = 12.0 + slow_s


def turns_within_a_second(do: Script) -> None:
    """Two nodes, whose clocks differ by less than two seconds, replace or remove a packed file in turns, each as soon
    as it has polled the other's commit: by its own clock that may be in the future."""
    a, b, *_ = do.actors()
    f = do.name("f")
    at_s = do.prepare(a, do.new(f, PACKED))
    for turn in range(do.rng.choice([3, 4])):
        op = plans.Unlink(path=f) if do.rng.random() < 0.2 else do.new(f, PACKED)
        do.do(at_s, (a, b)[turn % 2], op)
        at_s += do.between(0.4, 0.5 + do.refresh_s)


def listed_before_polled(do: Script) -> None:
    """A packs f; B, which has not polled that, stores f as a plain object in the next second; C lists B's object, then
    polls A's commit, which is older, and has B's version all the same."""
    a, b, c, *_ = do.actors()
    f = do.name("f")
    do.prepare(b, do.new(f, PLAIN))
    listed_s = do.ttl_s
    stored_s = listed_s - do.between(0.05, 0.4)
    do.do(stored_s - do.between(0.2, 1.0), a, do.new(f, PACKED))
    do.do(stored_s, b, do.new(f, PLAIN))
    for look in range(30):
        do.do(listed_s - 0.3 + 0.1 * look, c, plans.Read(path=f))


def closed_during_a_list(do: Script) -> None:
    """A has read f. It has f open for writing when it lists the directory; the page with the old f is on its way back
    while f is closed as a plain object. A's users go on to see what they closed."""
    a, b, *_ = do.actors()
    d, f = do.name("d"), f"{do.name('d')}/f"
    at_s = do.prepare(b, plans.Mkdir(path=d), do.new(f, PLAIN))
    pause_s = round(0.6 * do.ttl_s, 3)
    do.do(at_s, a, do.new(f, PLAIN, pieces=2, pause_s=pause_s))
    closed_s = at_s + 2 * pause_s
    do.slow(closed_s - 0.9, a, 1.3, 0.0, "list", answer_s=do.between(0.5, 2.0))
    do.do(closed_s - do.between(0.0, 0.6), a, plans.List(path=d), user=1)
    for look in range(8):
        do.do(closed_s + 0.4 * look, a, plans.Read(path=f), user=2)


def closed_during_a_question(do: Script) -> None:
    """A has f open when B stores it as a plain object; A packs f in the next second. B polls that, and asks the store
    for its own object; while the answer is on its way, a program of B closes f again. That is not what was asked for,
    and stays."""
    a, b, *_ = do.actors()
    f = do.name("f")
    at_s = do.prepare(a, do.new(f, PLAIN))
    do.do(at_s, a, do.new(f, PACKED, pieces=2, pause_s=0.6))
    do.do(at_s + do.between(0.2, 1.1), b, do.new(f, PLAIN))
    do.slow(at_s + 1.2, b, do.refresh_s + 0.5, 0.0, "head", answer_s=do.between(1.0, 2.0))
    do.do(at_s + 1.2 + do.between(0.3, 0.5 + do.refresh_s), b, do.new(f, PLAIN))
    for look in range(8):
        do.do(at_s + 1.7 + 0.5 * look, b, plans.Read(path=f), user=1)


def copy_meets_a_change(do: Script) -> None:
    """A renames the plain object f to g, and a command copies it to key g some seconds later. At about that moment B
    packs g, or stores a plain object there, which the command has not polled, and perhaps others hear of after it."""
    a, b, *_ = do.actors()
    f, g = do.name("f"), do.name("g")
    at_s = do.prepare(a, do.new(f, PLAIN))
    do.do(at_s, a, plans.Rename(old=f, new=g))
    copied_s = at_s + do.heard_s
    do.do(copied_s, a, plans.Admin(what="relocate"), user=8)
    stored_s = copied_s + do.between(-0.8, 0.8)
    sizes, slow_s = do.rng.choice([(PACKED, do.between(1.0, 4.0)), (PACKED, 0.0), (PLAIN, 0.0)])
    do.slow(stored_s - 0.1, b, 1.0, slow_s, "put")
    do.do(stored_s, b, do.new(g, sizes))
    do.quiet_s = 14.0 + DELETE_AFTER_S


def object_returns_to_its_key(do: Script) -> None:
    """A renames a to b, which a command copies to its new key. B stores the same bytes as a new file a, which has the
    same ETag as the object that was copied, and gc deletes what nobody refers to."""
    x, y, *_ = do.actors()
    a, b = do.name("a"), do.name("b")
    write = do.new(a, PLAIN)
    at_s = do.prepare(x, write)
    do.do(at_s, x, plans.Rename(old=a, new=b))
    copied_s = at_s + do.heard_s
    do.do(copied_s, x, plans.Admin(what="relocate"), user=8)
    again_s = copied_s + do.between(1.0, 10.0)
    do.do(again_s, y, write)
    do.do(again_s + do.between(1.0, 5.0), x, plans.Admin(what="gc", grace_s=do.rng.choice([1.0, 5.0])), user=8)


def pack_under_the_old_name(do: Script) -> None:
    """A renames the plain object a to b, and before that is copied packs a new a with others: the object at key a is
    still b's."""
    x, *_ = do.actors()
    a, b, c = do.name("a"), do.name("b"), do.name("c")
    at_s = do.prepare(do.rng.randrange(do.nodes), do.new(a, PLAIN))
    do.do(at_s, x, plans.Rename(old=a, new=b))
    at_s += do.between(0.1, 4.0)
    do.do(at_s, x, do.new(a, PACKED))
    do.do(at_s, x, do.new(c, PACKED), user=1)


def removed_and_stored_again(do: Script) -> None:
    """A unlinks the plain object f. Then it, or B, which has polled that or not, stores f again: the same bytes, or
    others, before the object is deleted, or after that."""
    a, b, *_ = do.actors()
    f = do.name("f")
    write = do.new(f, PLAIN)
    at_s = do.prepare(do.rng.choice([a, b]), write)
    do.do(at_s, a, plans.Unlink(path=f))
    who = do.rng.choice([a, b])
    is_same = who == a or do.rng.random() < 0.5
    do.do(at_s + do.between(0.3, 5.5), who, write if is_same else do.new(f, PLAIN))


def rename_takes_along(do: Script) -> None:
    """A has listed d. B closes plain or packed files in it, and A renames d at once: they move along."""
    a, b, *_ = do.actors()
    d, e = do.name("d"), do.name("e")
    at_s = do.prepare(b, plans.Mkdir(path=d), do.new(f"{d}/f", PLAIN))
    do.do(at_s - 0.2, a, plans.List(path=d))
    sizes = do.rng.choice([PACKED, PLAIN])
    do.do(at_s, b, do.new(f"{d}/g", sizes))
    do.do(at_s, b, do.new(f"{d}/h", sizes), user=1)
    do.do(at_s + do.between(0.2, 1.2), a, plans.Rename(old=d, new=e))


def replaced_while_open(do: Script) -> None:
    """C opens f, of which it has nothing in its cache, and reads it; B replaces it in place by a longer file before the
    store is asked for the bytes."""
    b, c, *_ = do.actors()
    f = do.name("f")
    do.prepare(b, do.new(do.name("g"), PLAIN))
    do.do(0.2, b, do.new(f, PLAIN[:1]))
    at_s = 0.5 + do.ttl_s + do.between(0.5, 1.0)
    do.do(at_s, c, plans.List(path=f))
    do.slow(at_s, c, 3.0, do.between(0.5, 1.5), "get")
    do.do(at_s + 0.2, c, plans.Read(path=f, pause_s=do.rng.choice([0.01, 1.0])))
    do.do(at_s + do.between(0.15, 1.5), b, do.new(f, PLAIN[1:]))


def removal_after_a_return(do: Script) -> None:
    """A unlinks the plain object f, which is deleted. B stores the same bytes there again; A deletes something else
    before it polls that."""
    a, b, *_ = do.actors()
    f, g = do.name("f"), do.name("g")
    write = do.new(f, PLAIN)
    at_s = do.prepare(b, write, do.new(g, PLAIN))
    do.do(at_s, a, plans.Unlink(path=f))
    deleted_s = at_s + do.between(4.5, 6.0)
    do.do(deleted_s - do.between(0.5, 2.2), a, plans.Unlink(path=g))
    do.do(deleted_s, b, write)


def gc_after_a_rename(do: Script) -> None:
    """A renames d to e, whose objects stay at their keys; gc runs, and once more after its grace period."""
    a, b, *_ = do.actors()
    d, e = do.name("d"), do.name("e")
    at_s = do.prepare(b, plans.Mkdir(path=d), do.new(f"{d}/f", PLAIN), do.new(f"{d}/g", PLAIN))
    do.do(at_s, a, plans.Rename(old=d, new=e))
    first_s, grace_s = at_s + do.between(3.0, 8.0), do.rng.choice([1.0, 2.0])
    for gc_s in (first_s, first_s + grace_s + 2.0):
        do.do(gc_s, b, plans.Admin(what="gc", grace_s=grace_s), user=1)


def removed_then_packed(do: Script) -> None:
    """A makes and removes names in its journal; B, which has seen that, makes them again."""
    a, b, *_ = do.actors()
    d, f = do.name("d"), f"{do.name('d')}/f"
    at_s = do.prepare(b, plans.Mkdir(path=d), do.new(f, PACKED))
    do.do(at_s, a, plans.Unlink(path=f))
    do.do(at_s + do.between(3.5, 6.0), b, do.new(f, PACKED))


def refused_pack(do: Script) -> None:
    """The store refuses A's PUTs until A gives up: A's users are told."""
    a, *_ = do.actors()
    at_s = do.prepare(a, do.new(do.name("f"), PLAIN))
    do.do(at_s - 0.1, a, plans.Storm(seconds=RETRY_S + 12.0, slow_down=1.0, kinds=("put",)))
    do.do(at_s, a, do.new(do.name("g"), PACKED))


def unanswered_commit(do: Script) -> None:
    """A renames the plain object f to g, or packs a new file g: the store has the commit, but no answer reaches A until
    it gives up. Then A replaces, removes or renames the file, before it polls."""
    a, *_ = do.actors()
    f, g, h = do.name("f"), do.name("g"), do.name("h")
    do.prepare(a, do.new(f, PLAIN))
    at_s = do.between(0.1, 1.2)  # what it has listed will do
    kinds = ("put", "head", "list", "get")
    do.do(at_s - 0.001, a, plans.Storm(seconds=RETRY_S + do.between(10.0, 45.0), lost_answer=1.0, kinds=kinds))
    pairs: list[tuple[plans.AnyOp, list[plans.AnyOp]]] = [
        (plans.Rename(old=f, new=g), [do.new(f, PLAIN)]),
        (do.new(g, PACKED), [do.new(g, PACKED), plans.Unlink(path=g), plans.Rename(old=g, new=h)]),
    ]
    first, seconds = do.rng.choice(pairs)
    do.do(at_s, a, first)
    do.do(at_s + 0.1, a, do.rng.choice(seconds))


def unanswered_creation(do: Script) -> None:
    """A creates a file with O_EXCL; the answer to its PUT is lost, and the next one says that the object is there."""
    a, *_ = do.actors()
    f = do.name("f")
    at_s = do.prepare(a, do.new(do.name("g"), PLAIN))
    do.do(at_s - 0.1, a, plans.Storm(seconds=1.0, lost_answer=1.0, kinds=("put",)))
    do.do(at_s, a, do.new(f, PLAIN, how="exclusive"))


def late_commit(do: Script) -> None:
    """The PUT of A's commit takes longer than polls look back; B commits something when A's commit is that old, and
    polls its own."""
    a, b, *_ = do.actors()
    at_s = do.prepare(a, do.new(do.name("f"), PACKED))
    slow_s = POLL_WINDOW_S + do.between(8.0, 30.0)
    do.slow(at_s - 0.1, a, 1.0, slow_s, "put")
    do.do(at_s, a, do.new(do.name("g"), PACKED))
    do.do(at_s + do.between(POLL_WINDOW_S + 2.0, slow_s - 1.0), b, do.new(do.name("h"), PACKED))


def death_after_a_commit(do: Script) -> None:
    """A's commit is in the store, and A dies before it notes that. B, which has polled it, undoes what it said: removes
    the link, or creates the removed file again. A's next daemon does not say it again."""
    a, b, *_ = do.actors()
    f, link = do.name("f"), do.name("l")
    at_s = do.prepare(b, do.new(f, PACKED))
    do.do(at_s - 0.1, a, plans.Kill(failpoint="commit.sent", down_s=do.between(5.0, 8.0)))
    pairs: list[tuple[plans.AnyOp, plans.AnyOp]] = [
        (plans.Symlink(path=link, target=f), plans.Unlink(path=link)),
        (plans.Unlink(path=f), do.new(f, PACKED)),
    ]
    ours, theirs = do.rng.choice(pairs)
    do.do(at_s, a, ours)
    do.do(at_s + 1.3 + do.between(0.5, 1.0 + do.refresh_s), b, theirs)


def removed_while_it_is_packed(do: Script) -> None:
    """The PUT of A's pack with f is slow; B removes f meanwhile, which A polls before its PUT ends."""
    a, b, *_ = do.actors()
    f = do.name("f")
    at_s = do.prepare(a, do.new(f, PACKED))
    do.slow(at_s - 0.1, a, 2.0, do.between(2.5, 7.0), "put")
    do.do(at_s, a, do.new(f, PACKED))
    do.do(at_s + do.between(0.1, 1.5), b, plans.Unlink(path=f))


def replaced_while_removed(do: Script) -> None:
    """A removes f, and the PUT of that is slow; B packs a new f meanwhile, which A polls before its PUT ends."""
    a, b, *_ = do.actors()
    f = do.name("f")
    at_s = do.prepare(a, do.new(f, PACKED))
    do.slow(at_s - 0.1, a, 2.0, do.between(2.5, 7.0), "put")
    do.do(at_s, a, plans.Unlink(path=f))
    do.do(at_s + 1.0 + do.between(0.1, 1.5), b, do.new(f, PACKED))


def old_key_is_taken(do: Script) -> None:
    """A renames d to e. B, which has d/f open for writing and has not polled that, closes it in place. Later it makes d
    again, and publishes a new d/f by rename, at the key at which e/f has its bytes."""
    a, b, *_ = do.actors()
    d, e, f = do.name("d"), do.name("e"), f"{do.name('d')}/f"
    at_s = do.prepare(a, plans.Mkdir(path=d), do.new(f, PLAIN))
    pause_s = do.between(0.2, 1.0)
    renamed_s = at_s + 2 * pause_s - do.between(0.0, do.refresh_s)
    do.do(at_s, b, do.new(f, PLAIN, pieces=2, pause_s=pause_s))
    do.do(max(at_s + 0.1, renamed_s), a, plans.Rename(old=d, new=e))
    again_s = max(at_s + 0.1, renamed_s) + do.heard_s + do.between(-1.5, 0.5)
    do.do(again_s - 0.3, b, plans.Mkdir(path=d))
    do.do(again_s - 0.2, b, do.new(f + ".tmp", PLAIN))
    do.do(again_s, b, plans.Rename(old=f + ".tmp", new=f))
    do.quiet_s = 25.0


def repeated_deletion(do: Script) -> None:
    """A removes the plain object f; the answer to its DELETE is lost. B stores the same bytes as a new file f, before A
    finds out whether the object is gone."""
    a, b, *_ = do.actors()
    f = do.name("f")
    write = do.new(f, PLAIN)
    at_s = do.prepare(a, write)
    do.do(at_s, a, plans.Unlink(path=f))
    deleted_s = at_s + DELETE_AFTER_S
    do.do(deleted_s - 1.0, a, plans.Storm(seconds=6.0, lost_answer=1.0, kinds=("delete",)))
    do.do(deleted_s + do.between(0.0, 12.0), b, write)
    do.quiet_s = 45.0


def stored_during_the_deletion(do: Script) -> None:
    """A removes the plain object f; when its time has come, the DELETE is on its way for some seconds. B, which has
    polled the removal, stores another new file f meanwhile."""
    a, b, *_ = do.actors()
    f = do.name("f")
    at_s = do.prepare(a, do.new(f, PLAIN))
    do.do(at_s, a, plans.Unlink(path=f))
    deleted_s = at_s + DELETE_AFTER_S
    slow_s = do.between(2.0, 6.0)
    do.slow(deleted_s - 1.0, a, 6.0, slow_s, "delete")
    do.do(deleted_s + do.between(0.0, 2.0 + slow_s), b, do.new(f, PLAIN))
    do.quiet_s = 30.0


def removed_twice(do: Script) -> None:
    """A removes the plain object f, and stores the same bytes as a new file f. When the time of the first one would
    have come, B has just removed f once more, and C, which hears of that late, renames it."""
    a, b, c, *_ = do.actors()
    f, g = do.name("f"), do.name("g")
    write = do.new(f, PLAIN)
    at_s = do.prepare(a, write)
    do.do(at_s, a, plans.Unlink(path=f))
    do.do(at_s + do.between(0.3, 2.5), a, write)
    deleted_s = at_s + JOURNAL_S + DELETE_AFTER_S
    again_s = deleted_s - JOURNAL_S - do.between(0.3, 1.8)
    do.do(again_s, b, plans.Unlink(path=f))
    told_s = again_s + JOURNAL_S
    do.do(told_s - 0.1, c, plans.Read(path=f))
    do.slow(told_s - 0.05, c, 6.0, 0.0, "list", answer_s=4.0)
    do.do(max(told_s, deleted_s + do.between(-0.4, 0.8)), c, plans.Rename(old=f, new=g))
    do.quiet_s = 14.0 + DELETE_AFTER_S


def removed_while_it_is_renamed(do: Script) -> None:
    """A removes the plain object f, or replaces it under another name, and B renames f, of which neither has polled the
    other's: the object has a name when its time has come."""
    a, b, *_ = do.actors()
    f, g, h = do.name("f"), do.name("g"), do.name("h")
    at_s = do.prepare(a, do.new(f, PLAIN), do.new(h, PLAIN))
    removals: list[plans.AnyOp] = [plans.Unlink(path=f), do.new(f, PACKED), plans.Rename(old=h, new=f)]
    do.do(at_s, a, do.rng.choice(removals))
    do.do(at_s + do.between(-0.5, do.refresh_s), b, plans.Rename(old=f, new=g))
    do.quiet_s = 14.0 + DELETE_AFTER_S


def grace_of_a_pack_that_was_named_again(do: Script) -> None:
    """gc stores f again, and notes that its pack is not referred to. A, which has not polled that, renames f to g: the
    pack is referred to, and gc moves g out of it in its next run. B, which has not polled that, renames g: the pack has
    its whole grace period again."""
    a, b, *_ = do.actors()
    f, g, h = do.name("f"), do.name("g"), do.name("h")
    at_s = do.prepare(b, do.new(f, PACKED[:1]))  # less than half of its pack
    grace_s = do.refresh_s + 1.0
    do.do(at_s, a, plans.Admin(what="gc", grace_s=grace_s), user=8)
    do.do(at_s + do.between(0.3, 0.6), a, plans.Rename(old=f, new=g))
    again_s = at_s + grace_s + do.between(0.0, 1.0)
    do.do(again_s, a, plans.Admin(what="gc", grace_s=grace_s), user=8)
    do.do(again_s + do.between(0.5, 1.3), b, plans.Rename(old=g, new=h))


def gc_beside_renames(do: Script) -> None:
    """All nodes rename a few packed files, and write them now and then, while gc runs in a loop with a grace period in
    which every node hears of a commit: it stores what is left of a pack again, and deletes the pack, unless a rename
    that was under way has named it."""
    names = [do.name(letter) for letter in "fgh"]
    do.prepare(0, *(do.new(name, PACKED) for name in names[:2]))
    at_s = 0.0
    for _ in range(30):
        at_s += do.rng.expovariate(0.7)
        old, new = do.rng.sample(names, 2)
        op: plans.AnyOp = plans.Rename(old=old, new=new) if do.rng.random() < 0.7 else do.new(old, PACKED)
        do.do(at_s, do.rng.randrange(do.nodes), op)
    for run in range(int(at_s / 1.5)):
        do.do(1.0 + 1.5 * run, 0, plans.Admin(what="gc", grace_s=do.heard_s), user=8)


CLOSE: tuple[Scenario, ...] = (
    overtaken_commit, turns_within_a_second, listed_before_polled, closed_during_a_list, closed_during_a_question,
    copy_meets_a_change, object_returns_to_its_key, pack_under_the_old_name, removed_and_stored_again,
    removal_after_a_return, rename_takes_along, replaced_while_open, gc_after_a_rename, removed_then_packed,
    refused_pack, unanswered_commit, unanswered_creation, late_commit, death_after_a_commit,
    removed_while_it_is_packed, replaced_while_removed, old_key_is_taken, repeated_deletion, stored_during_the_deletion,
    removed_twice, removed_while_it_is_renamed, grace_of_a_pack_that_was_named_again,
    gc_beside_renames,
)  # fmt: skip
OFTEN: dict[Scenario, int] = {
    overtaken_commit: 4, turns_within_a_second: 2, copy_meets_a_change: 3, removed_and_stored_again: 3,
    closed_during_a_question: 2, unanswered_commit: 3, removed_twice: 2,
}  # fmt: skip

# -- under write-back


def marker_after_a_file(do: Script) -> None:
    """A closes a file of several parts, then writes and closes a small one: others see the small one after it."""
    a, *_ = do.actors()
    f, marker = do.name("f"), do.name("m")
    at_s = do.prepare(a, do.new(do.name("g"), PACKED))
    do.slow(at_s - 0.1, a, 4.0, do.between(1.0, 4.0), "part", "other")
    do.do(at_s, a, do.new(f, LARGE))
    do.do(at_s + 0.1, a, do.new(marker, PACKED))
    do.do(at_s, a, plans.Watch(seconds=15.0, first=f, then=marker), user=1)


def replaced_before_it_is_stored(do: Script) -> None:
    """A closes a, then b, then a again, as a larger file, while all of it waits: nobody sees b without an a."""
    x, *_ = do.actors()
    a, b = do.name("a"), do.name("b")
    at_s = do.prepare(x, do.new(do.name("g"), PACKED))
    do.slow(at_s - 0.1, x, 6.0, do.between(0.5, 4.0), "part", "other", "put")
    do.do(at_s, x, do.new(a, PACKED))
    do.do(at_s + 0.05, x, do.new(b, PACKED))
    do.do(at_s + do.between(0.06, 0.3), x, do.new(a, LARGE))
    do.do(at_s, x, plans.Watch(seconds=20.0, first=a, then=b), user=1)
    do.quiet_s = 16.0


def removal_after_a_file(do: Script) -> None:
    """A closes new, then removes old, or renames it away: others see new when they do not see old any more."""
    a, *_ = do.actors()
    old, new = do.name("f"), do.name("g")
    at_s = do.prepare(a, do.new(old, PACKED))
    do.slow(at_s - 0.1, a, 4.0, do.between(2.0, 5.0), "part", "other")
    do.do(at_s, a, do.new(new, LARGE))
    do.do(at_s + 0.1, a, plans.Unlink(path=old))
    do.do(at_s, a, plans.Watch(seconds=15.0, first=new, then=old, is_gone=True), user=1)


def death_after_a_pack(do: Script) -> None:
    """A's files are in the store, in a pack, and A dies before it records that: its next daemon finds its own."""
    a, *_ = do.actors()
    f, g = do.name("f"), do.name("g")
    at_s = do.prepare(a, do.new(do.name("h"), PACKED))
    failpoint = do.rng.choice(["commit.sent", "commit.sent", "publish.sent"])
    do.do(at_s - 0.1, a, plans.Kill(failpoint=failpoint, down_s=do.between(1.0, 4.0)))
    do.do(at_s, a, do.new(f, PACKED))
    do.do(at_s + 0.05, a, do.new(g, PACKED))


WRITEBACK: tuple[Scenario, ...] = (
    marker_after_a_file, replaced_before_it_is_stored, removal_after_a_file, death_after_a_pack, unanswered_creation,
)  # fmt: skip


# -- where the power is cut


def power_after_a_close(do: Script) -> None:
    """A acknowledges a file, small or of several parts, whose bytes are nowhere else; then its power is cut."""
    a, *_ = do.actors()
    f, g = do.name("f"), do.name("g")
    at_s = do.prepare(a, do.new(do.name("h"), PACKED))
    do.slow(at_s - 0.1, a, 4.0, 8.0, "put", "part", "other")
    size = do.rng.choice([PACKED, PLAIN, LARGE, (400_000,)])
    do.do(at_s, a, do.new(f, size))
    if do.rng.random() < 0.5:
        do.do(at_s + 0.05, a, do.new(g, size))
    do.do(at_s + do.between(0.05, 2.0), a, plans.Kill(down_s=1.0, power=True))


def power_after_a_commit(do: Script) -> None:
    """A renames f to h, and closes another file, which syncs that. The commit is in the store when the power is cut.
    B, which has polled the rename, removes the file, or renames it again: A's next daemon does not bring it back."""
    a, b, *_ = do.actors()
    f, g, h = do.name("f"), do.name("g"), do.name("h")
    at_s = do.prepare(b, do.new(f, PACKED))
    do.do(at_s - 0.1, a, plans.Kill(failpoint="commit.sent", down_s=do.between(5.0, 8.0), power=True))
    do.do(at_s, a, plans.Rename(old=f, new=h))
    do.do(at_s + do.between(0.05, 0.7), a, do.new(g, PACKED))
    theirs: list[plans.AnyOp] = [plans.Unlink(path=h), plans.Rename(old=h, new=do.name("i"))]
    do.do(at_s + 1.3 + do.between(0.5, 1.0 + do.refresh_s), b, do.rng.choice(theirs))


POWER: tuple[Scenario, ...] = (power_after_a_close, power_after_a_commit)


SETTINGS = ("close", "close", "close", "writeback", "power")
"""By seed, in turns."""


def _config(rng: random.Random, setting: str) -> dict[str, object]:
    config: dict[str, object] = {
        "pack": "always",
        "pack_threshold_bytes": PACK_THRESHOLD_BYTES,
        "refresh_s": rng.choice([1.0, 2.0]),
        "metadata_ttl_s": rng.choice([2.0, 5.0]),
        "delete_after_s": DELETE_AFTER_S,
        "staging_timeout_s": 60.0,
        "writeback_delay_s": rng.choice([0.2, 2.0]),
    }
    if setting != "close":
        config["durability"] = "writeback"
    return config


def make_directed(seed: int, nodes: int) -> Plan:
    """The plan of a seed of profile `directed`."""
    rng = random.Random(f"plan/directed/{seed}/{nodes}")
    setting = SETTINGS[seed % len(SETTINGS)]
    config = _config(rng, setting)
    scenarios = {"close": CLOSE, "writeback": WRITEBACK, "power": POWER}[setting]
    weights = [OFTEN.get(scenario, 1) for scenario in scenarios]
    chosen = rng.choices(scenarios, weights, k=rng.choice(ROUNDS))
    apart_s = rng.choice([0.0, 0.95, 0.95])
    return _plan("directed", seed, nodes, chosen, config, rng, apart_s, forgets=setting == "power")


def _plan(
    profile: str, seed: int, nodes: int, chosen: Sequence[Scenario], config: dict[str, object], rng: random.Random,
    apart_s: float, *, forgets: bool,
) -> Plan:  # fmt: skip
    rounds, content = [], 0
    for number, scenario in enumerate(chosen):
        script = Script(rng, nodes, number, config, content)
        scenario(script)
        rounds += script.rounds()
        content = script.content
    return Plan(
        profile=profile,
        seed=f"{profile}/{seed}/{nodes}",
        nodes=tuple(NodePlan(round(rng.uniform(-apart_s, apart_s), 3)) for _ in range(nodes)),
        rounds=tuple(rounds),
        config=config,
        forgets=forgets,
        note=", ".join(scenario.__name__ for scenario in chosen),
    )


def plan_of(scenario: Scenario, seed: int, nodes: int = 3, times: int = 1) -> Plan:
    """A plan of one scenario alone."""
    rng = random.Random(f"{scenario.__name__}/{seed}/{nodes}")
    setting = "power" if scenario in POWER else "writeback" if scenario in WRITEBACK else "close"
    config = _config(rng, setting)
    return _plan("directed", seed, nodes, [scenario] * times, config, rng, 0.95, forgets=setting == "power")
