"""The checkpoints of one directory: their order, which are complete and why others are not, and which may be pruned.

A checkpoint is a regular file directly in the directory, or a directory directly in it with all files below. A walk,
through a mount or through the names of a lake, makes a `Seen` of each, and `make_listing` a `Listing` of those. Nothing
is read or changed here. A listing holds one item for each checkpoint, not for each file.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

import msgspec

from lakefs_fuse.checkpoints.names import (
    MARKERS,
    PRUNED_PREFIX,
    is_checkpoint_file,
    looks_temporary,
    step_of,
    steps_order,
)

NS = 1_000_000_000
DURABLE = "durable"


class Seen(msgspec.Struct, kw_only=True):
    """A checkpoint as a walk found it.

    ``states`` counts files by their ``user.lakefs.state``; ``markers`` are names of files directly in the directory
    that may be success markers; ``mtime_ns`` is that of the newest file, 0 without files; ``has_suffix``: a file ends
    as those of checkpoints do; ``linked``: a symbolic link beside it leads to it."""

    name: str
    is_dir: bool
    files: int = 0
    bytes: int = 0
    mtime_ns: int = 0
    states: dict[str, int] = msgspec.field(default_factory=dict)
    markers: set[str] = msgspec.field(default_factory=set)
    has_suffix: bool = False
    linked: bool = False

    def add(self, name: str, size: int, mtime_ns: int, state: str = DURABLE) -> None:
        """Add one file; ``name`` is the last component of its path."""
        self.files += 1
        self.has_suffix = self.has_suffix or is_checkpoint_file(name)
        self.bytes += size
        self.mtime_ns = max(self.mtime_ns, mtime_ns)
        self.states[state] = self.states.get(state, 0) + 1


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as ``ls --json`` prints it; names are final.

    ``reason`` says why it is not ``complete``. ``where`` is ``store``, or ``node`` if some bytes are only on this node
    yet; ``state`` is that of its least durable file."""

    name: str
    path: str
    kind: str
    files: int
    bytes: int
    mtime: float
    age_s: float
    step: int | None
    complete: bool
    reason: str
    where: str
    state: str
    linked: bool = False


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints of a directory, newest first.

    ``order`` is by the numbers in the names (``step``) or by the times of the files (``mtime``); ``latest`` is the
    newest complete checkpoint, None if there is none; ``markers`` are the success markers that count here."""

    path: str
    order: str
    latest: str | None
    markers: list[str]
    checkpoints: list[Checkpoint]

    @property
    def newest(self) -> Checkpoint | None:
        """The checkpoint that is ``latest``."""
        return next((item for item in self.checkpoints if item.complete), None)


_RANKS = {DURABLE: 0, "failed": 2, "uploading": 3, "dirty": 4}
"""The least durable state has the highest rank; an unknown one has UNKNOWN_RANK."""
UNKNOWN_RANK = 1


def is_checkpoint(name: str, match: str | None, *, is_dir: bool) -> bool:
    """Whether a name counts as a checkpoint; ``match`` is the user's pattern for names."""
    if match is not None:
        return fnmatch.fnmatchcase(name, match) or name.startswith(PRUNED_PREFIX)
    return is_dir or is_checkpoint_file(name)


def marker_names(marker: str | None) -> tuple[str, ...]:
    """The file names that may be success markers."""
    return MARKERS if marker is None else (marker,)


def make_listing(
    path: str, seen: Sequence[Seen], *, marker: str | None, match: str | None = None, now_ns: int
) -> Listing:
    """A listing of ``seen``; ``path`` is the directory.

    With a ``marker`` every directory needs it; without, every directory needs one of `MARKERS` if any has one. Where
    nothing says which directories are checkpoints, neither a marker nor the user's pattern ``match``, their names and
    files have to."""
    expected = {name for item in seen for name in item.markers} if marker is None else {marker}
    names = [item.name for item in seen if not looks_temporary(item.name)]
    keys = steps_order(names) if names else None
    by_name = dict(zip(names, keys, strict=True)) if keys is not None else {}

    def newest_first(item: Seen) -> tuple[tuple[int, ...], int, str]:
        return by_name.get(item.name, (step_of(item.name) or 0,) if keys else ()), item.mtime_ns, item.name

    made = [
        _make(path, item, _why_incomplete(item, expected) or ("" if match or expected else _why_other(item)), now_ns)
        for item in sorted(seen, key=newest_first, reverse=True)
    ]
    return Listing(
        path=path,
        order="step" if keys is not None else "mtime",
        latest=next((item.name for item in made if item.complete), None),
        markers=sorted(expected),
        checkpoints=made,
    )


def _make(path: str, item: Seen, reason: str, now_ns: int) -> Checkpoint:
    state = _worst(item.states)
    return Checkpoint(
        name=item.name,
        path=f"{path.rstrip('/')}/{item.name}",
        kind="directory" if item.is_dir else "file",
        files=item.files,
        bytes=item.bytes,
        mtime=item.mtime_ns / NS,
        age_s=max(0, now_ns - item.mtime_ns) / NS if item.mtime_ns else 0.0,
        step=step_of(item.name),
        complete=not reason,
        reason=reason,
        where="store" if state == DURABLE else "node",
        state=state,
        linked=item.linked,
    )


def _worst(states: Iterable[str]) -> str:
    return max(sorted(states), key=lambda state: _RANKS.get(state, UNKNOWN_RANK), default=DURABLE)


def _why_incomplete(item: Seen, expected: set[str]) -> str:
    waiting = {state: count for state, count in item.states.items() if state != DURABLE}
    if item.name.startswith(PRUNED_PREFIX):
        return "being deleted"
    if looks_temporary(item.name):
        return "the name is a temporary one"
    if not item.files:
        return "no files"
    if waiting:
        text = ", ".join(f"{count} {state}" for state, count in sorted(waiting.items()))
        return f"not in the store yet ({text})" if item.is_dir else f"not in the store yet ({next(iter(waiting))})"
    if item.is_dir and expected and not item.markers & expected:
        return f"no {' or '.join(sorted(expected))}"
    return ""


def _why_other(item: Seen) -> str:
    """Why a directory does not look like a checkpoint; empty if it does."""
    looks_like_one = not item.is_dir or item.has_suffix or step_of(item.name) is not None
    return "" if looks_like_one else "no file ends as those of checkpoints do (--match takes any)"


# -- pruning


class Pruning(msgspec.Struct, frozen=True, kw_only=True):
    """What to prune: keep the ``keep`` newest complete checkpoints, and delete only what is older than
    ``older_than_s``.

    A name without a number is neither counted nor deleted, unless the user gave a pattern (``any_name``)."""

    keep: int | None = None
    older_than_s: float | None = None
    incomplete: bool = False
    any_name: bool = False


def choose(listing: Listing, pruning: Pruning) -> list[Checkpoint]:
    """The checkpoints to delete, oldest first.

    Never the newest complete one, one that is not entirely in the store, or the target of a symbolic link; incomplete
    ones only if they are older than the newest complete one."""
    chosen: list[Checkpoint] = []
    complete = 0
    newest = listing.newest
    for place, item in enumerate(listing.checkpoints):
        if item.name.startswith(PRUNED_PREFIX):
            chosen.append(item)
            continue
        if item.state != DURABLE:
            continue
        named = pruning.any_name or item.step is not None
        complete += item.complete and named
        spared = not named or item.linked or (pruning.older_than_s is not None and item.age_s < pruning.older_than_s)
        if item.complete:
            spared |= complete <= max(1, pruning.keep or 1)
        else:
            late = newest is None or place < listing.checkpoints.index(newest) or item.mtime >= newest.mtime
            spared |= not pruning.incomplete or late
        if not spared:
            chosen.append(item)
    return chosen[::-1]
