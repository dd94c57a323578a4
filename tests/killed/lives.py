"""Daemons that are killed: one process after the other, on the same cache directories and lake.

The lake is a local directory behind a store that answers slowly, and in some lakes loses requests and responses. A
process has one node or several, which die together; each looks at what the others change. Each user has a node, and
records in a diary what was acknowledged before the next operation; the next life reads there what the lake must hold.
"""

from __future__ import annotations

import pickle
import random
import time
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import trio

from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import FileError, Unavailable
from lakefs_fuse.store import client
from lakefs_fuse.store.open import open_store
from lakefs_fuse.store.probe import probe
from lakefs_fuse.store.protocol import Capabilities, ObjectStore
from tests.killed.users import Model, User, differences, seen, settled
from tests.memory_store import START_NS
from tests.vfs.lakes import Clock, Lake, Missing, lake
from tests.vfs.writing_back import told

LAKE = "lake"
RETRY_S = 20.0
TRACEBACK_PARTS = 60
PAUSES_S = (0.0, 0.0, 0.001, 0.01, 0.05)
REQUESTS = frozenset({
    "get", "head", "put", "copy", "list_page", "delete", "delete_many", "create_multipart", "upload_part",
    "upload_part_copy", "complete_multipart", "abort_multipart",
})  # fmt: skip


class Life(msgspec.Struct, frozen=True):
    """One process, from its mounts on. ``models`` has for each user what is certain, and what else may be."""

    root: str
    seed: int
    number: int
    models: list[tuple[Model, Model | None]]
    nodes: int
    delay_s: float
    slow_s: float
    lost: float
    pack: str
    delete_after_s: float
    last: bool


class Running(Clock):
    """Goes on, from life to life, as the machine's does."""

    def wall_ns(self) -> int:
        return START_NS + time.monotonic_ns()

    def boot_ns(self) -> int:
        return time.monotonic_ns()

    __call__ = wall_ns


class Slow:
    """A store that takes up to ``slow_s`` before and after each request. The share ``lost`` of the requests does not
    arrive, and as many responses do not."""

    def __init__(self, store: ObjectStore, rng: random.Random, slow_s: float, lost: float) -> None:
        self._store, self._rng, self._slow_s, self._lost = store, rng, slow_s, lost

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)
        return self._slowly(call) if name in REQUESTS else call

    def _slowly(self, call: Callable[..., object]) -> Callable[..., object]:
        def slow(*args: object, **kwargs: object) -> object:
            self._travel()
            try:
                return call(*args, **kwargs)
            finally:
                self._travel()

        return slow

    def _travel(self) -> None:
        time.sleep(self._rng.random() * self._slow_s)
        if self._rng.random() < self._lost:
            raise Unavailable("lost")


class Diary:
    """What a user is doing, and has been told. Whoever died while writing an entry had not gone on."""

    def __init__(self, life: Life, name: str) -> None:
        self._path = Path(life.root) / f"{name}.{life.number}"

    def write(self, text: str, certain: Model, pending: Model | None) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(pickle.dumps((time.monotonic(), text, settled(certain), pending and settled(pending))))

    def entries(self) -> list[tuple[float, str, Model, Model | None]]:
        found = []
        if self._path.exists():
            with self._path.open("rb") as file:
                with suppress(EOFError, pickle.UnpicklingError):
                    while True:
                        found.append(pickle.load(file))
        return found


def names(life: Life) -> list[str]:
    return [f"u{number}" for number in range(len(life.models))]


def live(life: Life, pipe: Connection) -> None:
    """In a process of its own: sends "ready", or what is wrong as a list of lines. Ends when it is killed."""
    client.BACKOFF_S_FIRST, client.BACKOFF_S_MAX = 0.002, 0.05
    try:
        wrong = trio.run(_live, life, pipe)
    except BaseException as error:
        wrong = traceback.format_exception(error)[-TRACEBACK_PARTS:]
    pipe.send(wrong)


async def _live(life: Life, pipe: Connection) -> list[str]:
    config = StoreConfig(source=Source.parse(f"file://{life.root}/{LAKE}"))
    directory = open_store(config, Node.of_this_machine())
    capabilities = probe(directory, random.Random(1), SystemClock())
    store: Any = Slow(directory, random.Random(f"{life.seed}/{life.number}"), life.slow_s, life.lost)
    users = [
        User(name, random.Random(f"{life.seed}/{name}/{life.number}"), certain, pending)
        for name, (certain, pending) in zip(names(life), life.models, strict=True)
    ]
    async with AsyncExitStack() as stack:
        mounts = [
            await stack.enter_async_context(lake(
                store, Path(life.root) / f"node{number}", clock=Running(), capabilities=capabilities,
                retry_timeout_s=RETRY_S if life.lost else 0.0, durability="writeback",
                writeback_delay_s=life.delay_s, pack=life.pack, orphans="abort",
                delete_after_s=life.delete_after_s,
            ))
            for number in range(life.nodes)
        ]  # fmt: skip
        users_of = [users[number :: life.nodes] for number in range(life.nodes)]
        if not life.number:
            for mounted, own in zip(mounts, users_of, strict=True):
                for user in own:
                    await mounted.mkdir(user.name)
                await mounted.fs.sync_names()
        for mounted, own in zip(mounts, users_of, strict=True):
            if wrong := await _compare(mounted, own, "after a death"):
                return wrong
        if life.last:
            return await _end(life, mounts, users_of, store, capabilities)
        pipe.send("ready")
        async with trio.open_nursery() as nursery:
            for mounted, own in zip(mounts, users_of, strict=True):
                if life.nodes > 1:
                    nursery.start_soon(_follow, mounted, random.Random(f"{life.seed}/{life.number}"), names(life))
                for user in own:
                    nursery.start_soon(_use, mounted, user, Diary(life, user.name))
    return []


async def _follow(mounted: Lake, rng: random.Random, tops: list[str]) -> None:
    """Apply what others committed, a few commits at a time, and look at everything in between."""
    while True:
        await trio.sleep(rng.choice(PAUSES_S) * rng.random())
        await mounted.poll()
        for top in tops:
            with suppress(FileError, Missing):  # removed since it was listed
                await seen(mounted, top)


async def _compare(mounted: Lake, users: list[User], when: str) -> list[str]:
    """What is none of the possible outcomes. From then on each user goes by the one that was found."""
    wrong = []
    for user in users:
        found = await seen(mounted, user.name)
        tries = [(differences(each, found), each) for each in (user.certain, user.pending) if each is not None]
        lines, user.certain = min(tries, key=lambda each: len(each[0]))
        user.pending = None
        wrong += [f"{when}, {line}" for line in lines]
    return wrong


async def _end(
    life: Life, mounts: list[Lake], users_of: list[list[User]], store: ObjectStore, capabilities: Capabilities
) -> list[str]:
    """Everything is stored: on each node, and on one that knows only the store, is what was acknowledged."""
    wrong = list[str]()
    for mounted in mounts:
        await mounted.fs.make_durable()
        await mounted.fs.sync_names()
        wrong += ["both versions of a file were kept"] * told(mounted)["conflicts"]
    for mounted, own in zip(mounts, users_of, strict=True):
        await mounted.poll()
        wrong += await _compare(mounted, own, "stored")
        wrong += await _compare(mounted, [user for user in chain(*users_of) if user not in own], "on another node")
    async with lake(store, Path(life.root) / "fresh", clock=Running(), capabilities=capabilities) as fresh:
        return wrong or await _compare(fresh, list(chain(*users_of)), "on a fresh node")


async def _use(mounted: Lake, user: User, diary: Diary) -> None:
    while True:
        step = user.step()
        user.pending = step.after
        diary.write(f"> {step.text}", user.certain, user.pending)
        await step.act(mounted)
        user.certain, user.pending = step.after, None
        diary.write(f"< {step.text}", user.certain, None)
        await trio.sleep(user.pause_s(PAUSES_S))


def history(life: Life) -> list[str]:
    """What the users of a life did, in its order."""
    entries = [(at_s, f"{name} {text}") for name in names(life) for at_s, text, _, _ in Diary(life, name).entries()]
    return [f"{at_s:.4f} {text}" for at_s, text in sorted(entries)] + [f"end of life {life.number}"]


def after(life: Life) -> list[tuple[Model, Model | None]]:
    """What has to be there, or else may be, once it was killed."""
    left = []
    for name, before in zip(names(life), life.models, strict=True):
        entries = Diary(life, name).entries()
        left.append((entries[-1][2], entries[-1][3]) if entries else before)
    return left
