"""Commits on one name, applied in every order, show what the reader of `docs/format.md` shows that applies them in the
order of their names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from lakefs_fuse.commits.archive import commit_key
from lakefs_fuse.commits.change import Change, merged
from lakefs_fuse.commits.record import OWN, THIS, Operation, Put, Record, Relocate, Remove, SetAttr
from lakefs_fuse.store.protocol import ObjectMeta
from tests.commits.archives import commit_of
from tests.commits.nodes import NS, START_S, Node, archive, at, plain, put
from tests.simulation.lake_reader import StoredObject, read_lake
from tests.tiers import sized

ETAGS = "ab"
KINDS = [
    *(("own", etag) for etag in ETAGS),
    *(("again", etag) for etag in ETAGS),
    *(("again dated", etag) for etag in ETAGS),
    *(("again twice", etag) for etag in ETAGS),
    *(("again and removed", etag) for etag in ETAGS),
    *(("own and removed", etag) for etag in ETAGS),
    *(("in place dated", etag) for etag in ETAGS),
    *(("in place of elsewhere", etag) for etag in ETAGS),
    *(("dated", etag) for etag in ETAGS),
    *(("remove dated", etag) for etag in ETAGS),
    *(("packed", hides) for hides in ("", *ETAGS)),
    *(("remove", hides) for hides in ETAGS),
    *(("remove elsewhere", hides) for hides in ("", *ETAGS)),
]
"""What a commit says of the name, and the ETag that it tells of or names. ``again``: the same bytes put there again;
``dated``: at DATED_S, after the first commit; alone the same bytes put there again, as the date says."""
DATED_S = 15
DATED = ("again dated", "again twice", "in place dated", "dated", "remove dated")
SAMPLES = {2: sized(200, 300), 3: sized(60, 300)}
"""Combinations of what commits say, by their number."""
PARTS = 32
"""Of all combinations of three; each takes 15 s."""
FORMAT = Path(__file__).parents[2] / "docs/format.md"
Kind = tuple[str, str]


class Case(NamedTuple):
    """``kinds`` are commits in the order of their names, ``order`` that in which they are applied to ``path``.
    ``lying`` is at the key in the end. After so many commits as ``listed_after``, ``listed`` is listed, or
    nothing where that is None."""

    kinds: tuple[Kind, ...]
    order: tuple[int, ...]
    lying: ObjectMeta | None
    path: str
    listed: ObjectMeta | None = None
    listed_after: int | None = None


def time_of(number: int) -> int:
    return 10 * (number + 1)


def writer_of(number: int) -> str:
    return f"{number:08x}"


def operations(kind: Kind, path: str, number: int) -> list[Operation]:
    what, etag = kind
    seconds = time_of(number)
    own = Put(path, OWN, 0, 1, 0o600, 0, 0, at(seconds), hides=etag)
    return {
        "own": [own],
        "again": [Remove(path), own],
        "again dated": [Remove(path), replace(own, dated_s=START_S + DATED_S)],
        "dated": [replace(own, dated_s=START_S + DATED_S)],
        "again twice": [Remove(path), replace(own, dated_s=START_S + DATED_S)] * 2,
        "again and removed": [Remove(path), own, Remove(path, hides=etag)],
        "own and removed": [own, Remove(path, hides=etag)],
        "in place of a": [Remove(path, hides="a"), own],
        "in place of elsewhere": [Remove(path, by_date=True), own],
        "in place dated": [
            Remove(path, hides="ba"[ETAGS.index(etag)], dated_s=START_S + DATED_S),
            replace(own, dated_s=START_S + DATED_S),
        ],
        "remove dated": [Remove(path, hides=etag, dated_s=START_S + DATED_S)],
        "packed": [put(path, seconds, hides=etag)],
        "remove": [Remove(path, hides=etag)],
        "remove elsewhere": [Remove(path, hides=etag, by_date=True)],
        "attributes": [SetAttr(path, OWN, 0, 1, etag, 0o640, 0, 0, 0)],
        "relocate": [Relocate(path, OWN, 0, etag, THIS, 0, 1, 0o600, 0, 0, 0, hides=etag)],
    }[what]  # type: ignore[return-value]


def told_in(kinds: Sequence[Kind]) -> list[str]:
    """ETags of plain objects that commits tell of."""
    return [etag for what, etag in kinds if what.startswith(("own", "again", "dated", "in place"))]


def lying_at(kinds: Sequence[Kind], path: str) -> Iterator[ObjectMeta | None]:
    """What may lie at the key: the object that a commit told of last, or that somebody put there before; or nothing."""
    yield None
    told = told_in(kinds)
    for etag in ETAGS:
        if told and told[-1] != etag:
            continue
        named = [time_of(number) - 3 for number, kind in enumerate(kinds) if kind[1] == etag]
        again = [time_of(number) for number, kind in enumerate(kinds) if kind == ("again", etag)]
        again += [DATED_S for what, told in kinds if told == etag and what in DATED]
        yield plain(path, etag, again[0] if again else min(named, default=5))


def is_told_or_dated(kinds: Sequence[Kind]) -> bool:
    """Each object that is removed was told of before, or its writer had listed it, after the first commit."""
    told = told_in(kinds)
    untold = [
        etag for number, (what, etag) in enumerate(kinds) if what == "remove" and ("own", etag) not in kinds[:number]
    ]
    return not untold and len(set(told)) == len(told) and is_dated_later(kinds)


def is_dated_later(kinds: Sequence[Kind]) -> bool:
    """No date of an object is later than the commit that says it."""
    return not any(word in kinds[0][0] for word in ("dated", "twice"))


def outdated(node: Node, record: Record, lying: ObjectMeta | None) -> dict[str, str]:
    """What the store answers to the doubts about a record."""
    found = {}
    for doubt in itertools.chain.from_iterable(node.applier.doubts(record)):
        if lying is None:
            is_outdated = not doubt.sets_attributes
        elif doubt.removed_ns or doubt.sets_attributes:
            is_outdated = not doubt.is_there(lying.etag, lying.mtime_ns)
        else:
            is_outdated = lying.etag == doubt.hides or lying.mtime_ns + NS <= record.time
        if is_outdated:
            found[doubt.path] = doubt.etag
    return found


def shown(node: Node, path: str) -> str:
    entry = node.find(path)
    if entry is None:
        return "nothing"
    return f"packed {entry.size}" if entry.place else entry.etag


def commits_of(cases: Sequence[Case]) -> dict[str, StoredObject]:
    """The commits of cases that have as many each, by key."""
    objects: dict[str, StoredObject] = {}
    for number in range(len(cases[0].kinds)):
        said = [each for case in cases for each in operations(case.kinds[number], case.path, number)]
        record = Record(writer=writer_of(number), time=at(time_of(number)), operations=said)
        key = commit_key(record.time, record.writer)
        objects[key] = StoredObject(commit_of({"filler": bytes(1000)}, record=record), f"etag {number}", record.time)
    return objects


def raw_lake(cases: Sequence[Case]) -> dict[str, str]:
    """What the reader of raw stores shows at each path."""
    objects = commits_of(cases)
    for case in cases:
        if case.lying is not None:
            objects[case.path] = StoredObject(b"1", case.lying.etag, case.lying.mtime_ns)
    names = read_lake(objects).names
    return {path: name.etag if name.key == path else f"packed {name.size}" for path, name in names.items()}


@pytest.mark.parametrize("commits", [2, 3])
def test_any_order_of_commits_shows_what_the_order_of_their_names_shows(tmp_path: Path, commits: int) -> None:
    combinations = list(itertools.product(KINDS, repeat=commits))
    some = Random(commits).sample(combinations, min(SAMPLES[commits], len(combinations)))
    node, cases, numbers = Node(tmp_path), [], itertools.count()
    for kinds in some:
        if not is_dated_later(kinds):
            continue
        for variant in range(len(list(lying_at(kinds, "")))):
            for order in itertools.permutations(range(commits)):
                path = str(next(numbers))
                lying = list(lying_at(kinds, path))[variant]
                cases.append(Case(kinds, order, lying, path))
    check(node, cases)
    assert len(cases) > sized(250, 500)


@pytest.mark.long  # the test above has a sample of these
@pytest.mark.parametrize("part", range(PARTS))
def test_every_three_commits_in_any_order_show_what_the_order_of_their_names_shows(tmp_path: Path, part: int) -> None:
    combinations = [kinds for kinds in itertools.product(KINDS, repeat=3) if is_dated_later(kinds)]
    numbers, cases = itertools.count(), list[Case]()
    for kinds in combinations[part::PARTS]:
        for variant in range(len(list(lying_at(kinds, "")))):
            for order in itertools.permutations(range(3)):
                path = str(next(numbers))
                cases.append(Case(kinds, order, list(lying_at(kinds, path))[variant], path))
    check(Node(tmp_path), cases)


@pytest.mark.parametrize(("commits", "sample"), [(2, sized(40, 60)), (3, sized(5, 12))])
def test_object_that_is_listed_between_commits_counts_for_no_node_alone(
    tmp_path: Path, commits: int, sample: int
) -> None:
    """A node that lists it before it hears of its removal has forgotten what it replaced; others have not."""
    kinds_listed = [kind for kind in KINDS if kind[0] in ("own", "packed", "remove", "remove dated")]
    combinations = [each for each in itertools.product(kinds_listed, repeat=commits) if is_told_or_dated(each)]
    some = Random(commits).sample(combinations, min(sample, len(combinations)))
    some.append((("packed", ""), *[("remove dated", "a")] * (commits - 1)))
    cases, numbers = list[Case](), itertools.count()
    for kinds in some:
        for variant, is_gone in itertools.product(range(len(list(lying_at(kinds, "")))), (False, True)):
            for order, after in itertools.product(itertools.permutations(range(commits)), range(commits + 1)):
                path = str(next(numbers))
                lying = list(lying_at(kinds, path))[variant]
                if lying is not None:
                    cases.append(Case(kinds, order, None if is_gone else lying, path, lying, after))
    check(Node(tmp_path), cases)
    assert len(cases) > sized(250, 500)


@pytest.mark.parametrize("commits", [2, 3])
def test_object_that_a_listing_does_not_show_any_more_is_not_forgotten(tmp_path: Path, commits: int) -> None:
    """Another program deleted it. A node that lists the name then goes on as nodes do that never listed it."""
    combinations = list(itertools.product(KINDS, repeat=commits))
    cases, numbers = list[Case](), itertools.count()
    for kinds in Random(commits).sample(combinations, min(SAMPLES[commits] // 2, len(combinations))):
        told = told_in(kinds)
        if len(set(told)) < len(told) or not is_dated_later(kinds):
            continue
        for order, after in itertools.product(itertools.permutations(range(commits)), range(1, commits + 1)):
            cases.append(Case(kinds, order, None, str(next(numbers)), None, after))
    check(Node(tmp_path), cases)
    assert len(cases) > sized(100, 200)


@pytest.mark.parametrize("ends", [("packed", ""), ("packed", "b"), ("remove elsewhere", "")])
def test_bytes_that_went_unlisted_and_were_replaced_count_as_for_who_did_not_list_the_name(
    tmp_path: Path, ends: Kind
) -> None:
    kinds = (("own", "a"), ends, ("own", "a"))
    cases = [Case(kinds, (0, 1, 2), None, str(after), None, after) for after in range(1, 4)]
    check(Node(tmp_path), cases)


@pytest.mark.parametrize(
    "kinds",
    [
        (("packed", "a"), ("dated", "a"), ("remove", "b")),
        (("remove elsewhere", "a"), ("packed", "b"), ("in place dated", "a")),
    ],
)
def test_bytes_that_were_put_again_and_went_unlisted_have_replaced_what_they_had(
    tmp_path: Path, kinds: tuple[Kind, ...]
) -> None:
    cases = [
        Case(kinds, order, None, f"{number} {after}", None, after)
        for number, order in enumerate(itertools.permutations(range(3)))
        for after in range(1, 4)
    ]
    check(Node(tmp_path), cases)


def test_removal_from_before_the_same_bytes_were_put_again_is_of_an_earlier_version(tmp_path: Path) -> None:
    """It comes after a commit that ended them unaware, and before one that tells of them once more."""
    kinds = (("own and removed", "a"), ("in place dated", "a"), ("again twice", "b"), ("own", "a"))
    orders = enumerate(itertools.permutations(range(4)))
    check(Node(tmp_path), [Case(kinds, order, plain(str(number), "a", 7), str(number)) for number, order in orders])


def test_bytes_that_are_put_again_after_a_removal_of_others_are_the_file(tmp_path: Path) -> None:
    """Another program replaced the object before the removal, and a rename came over the name before it put the earlier
    bytes there again: their ETag was told before, and no removal named it."""
    kinds = (("own", "a"), ("remove", "b"), ("packed", "b"), ("own", "a"))
    lying = time_of(2) + 1
    orders = [(0, 1, 2, 3), (1, 0, 2, 3)]  # who renamed had heard of both
    cases = [Case(kinds, order, plain(str(number), "a", lying), str(number)) for number, order in enumerate(orders)]
    check(Node(tmp_path), cases)
    names = raw_lake(cases)
    assert {names[case.path] for case in cases} == {"a"}


@pytest.mark.parametrize("first", ["own", "again", "again dated"])
@pytest.mark.parametrize("ends", [("packed", ""), ("packed", "b"), ("remove elsewhere", "")])
def test_bytes_that_are_told_of_again_after_a_commit_that_did_not_know_them_are_the_file(
    tmp_path: Path, first: str, ends: Kind
) -> None:
    """Two nodes stored them, or one told of them twice; who had not heard of the first commit shows the same."""
    kinds, cases = ((first, "a"), ends, ("own", "a")), list[Case]()
    for order in itertools.permutations(range(3)):
        path = str(len(cases))
        cases.append(Case(kinds, order, plain(path, "a", DATED_S), path))
    check(Node(tmp_path), cases)
    names = raw_lake(cases)
    assert {names[case.path] for case in cases} == {"a"}


@pytest.mark.parametrize("ends", [("packed", ""), ("remove elsewhere", "")])
def test_object_that_replaced_the_one_that_is_told_of_last_is_the_file_after_what_did_not_know_it(
    tmp_path: Path, ends: Kind
) -> None:
    """Two nodes stored one in place of the other, and the first told of its own last."""
    kinds, cases = (("own", "a"), ends, ("own", "b")), list[Case]()
    for order in itertools.permutations(range(3)):
        path = str(len(cases))
        cases.append(Case(kinds, order, plain(path, "a", time_of(0)), path))
    check(Node(tmp_path), cases)
    names = raw_lake(cases)
    assert {names[case.path] for case in cases} == {"a"}


@pytest.mark.parametrize("again", ["again dated", "dated"])
@pytest.mark.parametrize("ends", [("packed", ""), ("packed", "a"), ("remove", "a"), ("remove elsewhere", "")])
def test_bytes_that_two_nodes_put_there_again_in_one_second_are_the_file_after_what_ended_the_first(
    tmp_path: Path, again: str, ends: Kind
) -> None:
    """What ended the first has no date that says that it ended the second, too."""
    kinds, cases = (("again dated", "a"), ends, (again, "a")), list[Case]()
    for order in itertools.permutations(range(3)):
        path = str(len(cases))
        cases.append(Case(kinds, order, plain(path, "a", DATED_S), path))
    check(Node(tmp_path), cases)
    names = raw_lake(cases)
    is_hidden = ends == ("packed", "a") and again == "dated"  # by the file, which is later than the date
    assert {names[case.path] for case in cases} == {f"packed {time_of(1)}" if is_hidden else "a"}


def test_bytes_that_a_record_tells_twice_to_be_there_again_are_the_file(tmp_path: Path) -> None:
    """A daemon that died had journaled it, and the next one found the object."""
    kinds = (("own", "a"), ("remove", "a"), ("again twice", "a"))
    orders = list(itertools.permutations(range(3)))
    cases = [Case(kinds, order, plain(str(number), "a", 15), str(number)) for number, order in enumerate(orders)]
    check(Node(tmp_path), cases)
    names = raw_lake(cases)
    assert {names[case.path] for case in cases} == {"a"}


def test_file_that_replaced_an_object_stays_when_that_is_told_of_twice(tmp_path: Path) -> None:
    """Its writer hears of its own commit before that is answered, or two nodes have stored the same bytes."""
    kinds = (("packed", "a"), ("own", "a"), ("own", "a"))
    cases = [Case(kinds, order, None, str(number)) for number, order in enumerate(itertools.permutations(range(3)))]
    check(Node(tmp_path), cases)
    names = raw_lake(cases)
    assert {names[case.path] for case in cases} == {f"packed {time_of(0)}"}


@pytest.mark.parametrize("told", ["own", "own and removed"])
@pytest.mark.parametrize("removal", ["remove", "remove dated"])
def test_file_that_replaced_an_object_stays_when_that_is_told_of_after_its_removal(
    tmp_path: Path, removal: str, told: str
) -> None:
    """The object was removed by who had not heard of the file."""
    kinds = (("packed", "a"), (removal, "a"), (told, "a"))
    cases = [Case(kinds, order, None, str(number)) for number, order in enumerate(itertools.permutations(range(3)))]
    check(Node(tmp_path), cases)
    names = raw_lake(cases)
    assert {names[case.path] for case in cases} == {f"packed {time_of(0)}"}


@pytest.mark.parametrize("again", ["again", "again dated", "again and removed"])
def test_file_over_an_object_stays_away_when_its_bytes_that_were_put_again_are_removed(
    tmp_path: Path, again: str
) -> None:
    """Also where that is heard of first, and of the file last."""
    kinds = (("packed", "a"), (again, "a"), ("remove", "a"))
    cases = [Case(kinds, order, None, str(number)) for number, order in enumerate(itertools.permutations(range(3)))]
    check(Node(tmp_path), cases)
    assert not {case.path for case in cases} & set(raw_lake(cases))


def test_file_over_an_object_ends_with_the_same_bytes_that_were_put_there_again_later(tmp_path: Path) -> None:
    """Their writer had not seen it, stored them over what it saw, and renamed the file in the same commit."""
    kinds = (("packed", "a"), ("again and removed", "a"))
    cases = [Case(kinds, order, None, str(number)) for number, order in enumerate(itertools.permutations(range(2)))]
    check(Node(tmp_path), cases)
    assert not {case.path for case in cases} & set(raw_lake(cases))


def test_file_over_bytes_that_were_put_there_again_stays_when_that_is_told_later(tmp_path: Path) -> None:
    """Who put it there had listed the object, of which no commit had told: by its date it is not the removed one."""
    kinds = (("remove", "a"), ("packed", "a"), ("dated", "a"))
    orders = list(itertools.permutations(range(3)))
    cases = [Case(kinds, order, plain(str(number), "a", DATED_S), str(number)) for number, order in enumerate(orders)]
    check(Node(tmp_path), cases)
    names = raw_lake(cases)
    assert {names[case.path] for case in cases} == {f"packed {time_of(1)}"}


@pytest.mark.parametrize("replaced", [("in place dated", "b"), ("remove dated", "a")])
def test_file_put_after_bytes_that_were_there_again_went_stays_when_they_are_told_of(
    tmp_path: Path, replaced: Kind
) -> None:
    """Their writer's commit is the last one, and does not know that file."""
    kinds = (("remove", "a"), replaced, ("packed", "b"), ("again dated", "a"))
    orders = list(itertools.permutations(range(4)))
    cases = [Case(kinds, order, plain(str(number), "b", DATED_S), str(number)) for number, order in enumerate(orders)]
    check(Node(tmp_path), cases)
    names = raw_lake(cases)
    assert {names.get(case.path) for case in cases} == {f"packed {time_of(2)}"}


def test_object_that_a_replaced_file_hid_stays_hidden_although_that_file_is_dated_before_it(tmp_path: Path) -> None:
    """Who wrote the object in place heard of an exchange then, and dated what hides it right after that."""
    kinds, cases = (("packed", "a"), ("packed", "")), list[Case]()
    for order, after in itertools.product(((0, 1), (1, 0)), (None, 0, 1, 2)):
        path = str(len(cases))
        lying = plain(path, "a", time_of(1))
        cases.append(Case(kinds, order, lying, path, lying, after))
    check(Node(tmp_path), cases)
    names = raw_lake(cases)
    assert {names[case.path] for case in cases} == {f"packed {time_of(1)}"}


def test_bytes_that_were_put_over_a_file_that_hides_them_are_the_file(tmp_path: Path) -> None:
    """By their date they came after it, and it hides an earlier object."""
    kinds = (("packed", "a"), ("dated", "a"))
    cases = [Case(kinds, order, plain(str(order), "a", DATED_S), str(order)) for order in ((0, 1), (1, 0))]
    check(Node(tmp_path), cases)
    names = raw_lake(cases)
    assert {names[case.path] for case in cases} == {"a"}


def test_object_in_place_of_a_file_elsewhere_stays_away_where_it_was_removed_before_a_commit_told_of_it(
    tmp_path: Path,
) -> None:
    """Who listed it had renamed its directory, so it is the file of another name."""
    kinds = (("packed", ""), ("remove", "a"), ("in place of elsewhere", "a"))
    cases = [
        Case(kinds, order, plain(str(number), "a", time_of(1)), str(number))
        for number, order in enumerate(itertools.permutations(range(3)))
    ]
    check(Node(tmp_path), cases)
    assert not {case.path for case in cases} & set(raw_lake(cases))


def test_file_over_an_object_ends_with_what_was_put_in_place_of_both(tmp_path: Path) -> None:
    """One commit says that the object went, and what is there in its place; that is removed later."""
    kinds = (("packed", "a"), ("in place of a", "b"), ("remove", "b"))
    cases = [Case(kinds, order, None, str(number)) for number, order in enumerate(itertools.permutations(range(3)))]
    check(Node(tmp_path), cases)
    assert not {case.path for case in cases} & set(raw_lake(cases))


def test_file_over_an_object_stays_where_one_commit_tells_of_that_and_removes_it(tmp_path: Path) -> None:
    kinds = (("packed", "a"), ("own and removed", "a"))
    cases = [Case(kinds, order, None, str(number)) for number, order in enumerate(itertools.permutations(range(2)))]
    check(Node(tmp_path), cases)
    names = raw_lake(cases)
    assert {names[case.path] for case in cases} == {f"packed {time_of(0)}"}


@pytest.mark.parametrize("again", ["again", "again dated"])
def test_object_that_was_put_in_place_of_bytes_that_were_there_again_stays_when_those_are_removed(
    tmp_path: Path, again: str
) -> None:
    """Who told of those later had not seen it, and removed them: the date of the commit does not hide it."""
    kinds, cases = (("own", "a"), (again, "b"), ("remove", "b")), list[Case]()
    for order in itertools.permutations(range(3)):
        path = str(len(cases))
        cases.append(Case(kinds, order, plain(path, "a", time_of(1) - 2), path))
    check(Node(tmp_path), cases)
    names = raw_lake(cases)
    assert {names[case.path] for case in cases} == {"a"}


@pytest.mark.parametrize("again", ["again", "again dated", "dated"])
@pytest.mark.parametrize("removal", ["remove", "remove dated"])
def test_file_that_was_replaced_by_what_it_hides_ends_when_that_is_removed(
    tmp_path: Path, again: str, removal: str
) -> None:
    kinds = (("packed", "a"), (again, "a"), (removal, "a"))
    cases = [Case(kinds, order, None, str(number)) for number, order in enumerate(itertools.permutations(range(3)))]
    check(Node(tmp_path), cases)
    assert not {case.path for case in cases} & set(raw_lake(cases))


def test_object_that_was_listed_goes_when_a_commit_tells_that_it_is_older_than_a_removal(tmp_path: Path) -> None:
    """By its date it was put there after the removal, which did not know of it."""
    kinds = (("packed", ""), ("own", "a"), ("remove elsewhere", ""))
    cases = list[Case]()
    for order, after in itertools.product(itertools.permutations(range(3)), range(4)):
        path = str(len(cases))
        lying = plain(path, "a", time_of(2))
        cases.append(Case(kinds, order, lying, path, lying, after))
    check(Node(tmp_path), cases)
    assert not raw_lake(cases).keys() & {case.path for case in cases}


def test_object_that_was_put_in_place_of_one_with_other_attributes_is_relocated(tmp_path: Path) -> None:
    """Whichever of the two commits is dated first, unless the object that got attributes lies there again, or a commit
    has removed the one that is relocated."""
    changes: list[tuple[Kind, ...]] = [
        (("attributes", "a"), ("relocate", "b")),
        (("relocate", "b"), ("attributes", "a")),
    ]
    whole = [(kinds, order) for kinds in changes for order in itertools.permutations(range(2))]
    whole += [((("remove", "b"), *kinds), (0, 1, 2)) for kinds in changes]
    cases = [
        Case(kinds, order, None if etag is None else plain(f"f{number}{etag}", etag, 5), f"f{number}{etag}")
        for number, (kinds, order) in enumerate(whole)
        for etag in (None, *ETAGS)
    ]
    for commits in (2, 3):
        check(Node(tmp_path / f"{commits}"), [case for case in cases if len(case.kinds) == commits])


@pytest.mark.parametrize("commits", [1, 2])
def test_commit_that_is_applied_twice_shows_what_it_shows_once(tmp_path: Path, commits: int) -> None:
    combinations, numbers, cases = list(itertools.product(KINDS, repeat=commits)), itertools.count(), list[Case]()
    for kinds in Random(commits).sample(combinations, min(SAMPLES[2], len(combinations))):
        told = told_in(kinds)
        if len(set(told)) < len(told):
            continue
        for variant in range(len(list(lying_at(kinds, "")))):
            path = str(next(numbers))
            order = tuple(number for number in range(commits) for _ in range(2))
            cases.append(Case(kinds, order, list(lying_at(kinds, path))[variant], path))
    check(Node(tmp_path), cases)


def test_reader_that_is_printed_in_the_format_shows_what_this_one_shows() -> None:
    (source,) = re.findall(r"```python\n(.*?)```", FORMAT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, FORMAT.name, "exec"), names)
    cases, numbers = [], itertools.count()
    for kinds in itertools.product(KINDS, repeat=2):
        for variant in range(len(list(lying_at(kinds, "")))):
            path = str(next(numbers))
            cases.append(Case(kinds, (0, 1), list(lying_at(kinds, path))[variant], path))
    replaced = str(next(numbers))
    cases.append(Case((("packed", "a"), ("packed", "")), (0, 1), plain(replaced, "a", time_of(1)), replaced))
    lying = {case.path: (case.lying.etag, case.lying.mtime_ns) for case in cases if case.lying is not None}
    commits = {key: stored.data for key, stored in commits_of(cases).items()}
    printed = {
        path: etag if key == path else f"packed {size}"
        for path, (key, etag, _, size, *_) in names["files"](commits, lying).items()
    }
    assert printed == raw_lake(cases)


def list_one(node: Node, case: Case) -> None:
    node.list_one(case.path, *([] if case.listed is None else [case.listed]))


def record_of(case: Case, number: int) -> Record:
    change = Change(operations=operations(case.kinds[number], case.path, number))
    return merged([change], writer_of(number), at(time_of(number)), range(1000))


def apply(node: Node, case: Case, record: Record) -> None:
    answers = outdated(node, record, case.listed or case.lying)
    node.applier.apply(record, archive(record.time, record.writer), outdated=answers, whole=True)


def check(node: Node, cases: Sequence[Case]) -> None:
    """Apply the commits of each case to a node, list what lies there, and compare."""
    for case in cases:
        for applied, number in enumerate(case.order):
            if applied == case.listed_after:
                list_one(node, case)
            apply(node, case, record_of(case, number))
        if case.listed_after == len(case.order):
            list_one(node, case)
        for number in case.order:  # as the next poll does
            record = record_of(case, number)
            if not node.applier.commits.is_applied(record.time, record.writer):
                apply(node, case, record)
    node.list(*(case.lying for case in cases if case.lying is not None))
    expected = raw_lake(cases)
    wrong = [
        (case, found, should_be)
        for case in cases
        if (found := shown(node, case.path)) != (should_be := expected.get(case.path, "nothing"))
    ]
    assert not wrong
