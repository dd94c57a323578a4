"""Tells the mount which files a training job reads next, so that they are there when it does.

    from lakefs_fuse.torch import ReadAhead

    sampler = ReadAhead(RandomSampler(dataset), paths=lambda index: dataset.samples[index][0])
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)

A `DataLoader` asks its sampler for indices a few batches before its workers read them. `ReadAhead` asks the sampler
that it wraps for some more, and names their files to the daemon of the mount, which reads them then. A sampler of
batches is wrapped in the same way (``batch_sampler=ReadAhead(…)``). Where only the dataset is at hand,
`ReadAheadDataset` names the files of a whole batch in the worker that reads it, before it reads the first.

What always holds: indices come in the order and number of the wrapped sampler; a path that is not in a mount of this
program, or a daemon that does not answer, costs nothing but that, and is no error. torch itself is not needed here.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from lakefs_fuse.control import protocol
from lakefs_fuse.control.client import connect
from lakefs_fuse.control.mounts import read_mounts
from lakefs_fuse.errors import LakeError
from lakefs_fuse.product import FILESYSTEM

AHEAD = 256
"""Samples: with files of 50 KB what a node reads in a second or less."""
NAMES_MAX = 64
"""Named in one request."""
RETRY_S = 30.0
"""A daemon that did not answer is left alone for so long."""
SILENCE_S_MAX = 5.0
QUEUED_MAX = 64
MOUNTS_S = 10.0
"""A mount that is made later is found so late."""
DIRECTORIES_MAX = 1 << 16
POSITION = frozenset({"state_dict", "load_state_dict"})
"""Attributes by which loaders that can resume (torchdata's StatefulDataLoader) save and set where a sampler is. Of one
without them they count samples, and skip as many."""
log = logging.getLogger(__name__)

Path: TypeAlias = str | os.PathLike[str]
PathsOf: TypeAlias = Callable[[Any], Path | Sequence[Path]]
"""Absolute paths of the files that one sample is read from, by its index."""


class ReadAhead:
    """Indices, or batches of them, of ``sampler``; the files of the next ``ahead`` samples are named to the mount.
    ``paths`` are those of each index, or a function of it. All other attributes are the sampler's (``set_epoch``),
    except its position (``state_dict``, ``load_state_dict``): it is ``ahead`` samples beyond what came out here, so a
    job that resumed from there would miss these."""

    def __init__(self, sampler: Iterable[Any], paths: Sequence[Path] | PathsOf, *, ahead: int = AHEAD) -> None:
        self._sampler, self._ahead = sampler, ahead
        self._paths: PathsOf = paths if callable(paths) else paths.__getitem__

    def __iter__(self) -> Iterator[Any]:
        waiting, samples = deque[Any](), 0
        with _Requester() as requester:
            for item in self._sampler:
                indices = _indices(item)
                waiting.append(item)
                samples += len(indices)
                requester.add(path for index in indices for path in _as_paths(self._paths(index)))
                while samples > self._ahead and len(waiting) > 1:
                    samples -= len(_indices(waiting[0]))
                    yield waiting.popleft()
            requester.flush()
            yield from waiting

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # as in a copy that is being unpickled
            raise AttributeError(name)
        if name in POSITION:
            raise AttributeError(f"{name} of the sampler is not that of ReadAhead: count the samples that were read")
        return getattr(self._sampler, name)


class ReadAheadDataset:
    """The map-style ``dataset``, whose samples are fetched by the batch: their files are named to the mount first.
    ``paths`` as those of `ReadAhead`. All other attributes are the dataset's."""

    def __init__(self, dataset: Any, paths: Sequence[Path] | PathsOf) -> None:
        self._dataset = dataset
        self._paths: PathsOf = paths if callable(paths) else paths.__getitem__

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """What `DataLoader` calls with the indices of a batch, in a worker."""
        _MOUNTS.request_readahead([path for index in indices for path in _as_paths(self._paths(index))])
        fetch = getattr(self._dataset, "__getitems__", None)
        return list(fetch(indices)) if fetch is not None else [self._dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


def _indices(item: Any) -> Sequence[Any]:
    """Of a batch, which is a list; a tuple may be the index of one sample."""
    return item if isinstance(item, list) else (item,)


def _as_paths(paths: Path | Sequence[Path]) -> Sequence[Path]:
    return (paths,) if isinstance(paths, str | os.PathLike) else paths


def _is_utf8(name: str) -> bool:
    """Other names are in no lake."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Mounts:
    """Names files to the daemons of the mounts that they are in. For one thread."""

    def __init__(self) -> None:
        self._owners: dict[str, int] = {}
        """Of mounts, by mountpoint: the user whose daemon serves it."""
        self._found_at_s = -MOUNTS_S
        self._of_directory: dict[str, tuple[str, str]] = {}
        self._silent_until_s = 0.0

    def request_readahead(self, paths: Sequence[Path]) -> None:
        """Raises nothing: what the caller passes as a path is for its dataset to judge."""
        if time.monotonic() < self._silent_until_s:
            return
        try:
            self._read_mountpoints()
            by_mount: dict[str, list[str]] = {}
            for path in paths:
                directory, name = os.path.split(os.fspath(path))
                mountpoint, prefix = self._of_directory.get(directory) or self._find(directory)
                if mountpoint and _is_utf8(prefix + name):
                    by_mount.setdefault(mountpoint, []).append(prefix + name)
            for mountpoint, names in by_mount.items():
                _request_readahead(mountpoint, self._owners[mountpoint], names)
        except Exception as error:
            log.warning("files are not read ahead: %s", error)
            self._silent_until_s = time.monotonic() + RETRY_S

    def _read_mountpoints(self) -> None:
        """Forget where directories are when there are other mounts than before."""
        now_s = time.monotonic()
        if now_s < self._found_at_s + MOUNTS_S:
            return
        self._found_at_s = now_s
        found = {each.mountpoint: each.owner for each in read_mounts() if each.fstype == f"fuse.{FILESYSTEM}"}
        if found != self._owners:
            self._owners = found
            self._of_directory.clear()

    def _find(self, directory: str) -> tuple[str, str]:
        """The mountpoint, empty where there is none, and the path of the directory in the mount."""
        path = os.path.realpath(directory)
        inside = [each for each in self._owners if f"{path}/".startswith(f"{each}/")]
        mountpoint = max(inside, key=len, default="")
        found = mountpoint, f"{path}/".removeprefix(f"{mountpoint}/")
        if len(self._of_directory) >= DIRECTORIES_MAX:
            self._of_directory.clear()
        self._of_directory[directory] = found
        return found


def _request_readahead(mountpoint: str, owner: int, names: Sequence[str]) -> None:
    """On a connection of its own: a daemon takes few at a time, and jobs have many processes. A daemon serves its own
    user and root. Raises LakeError."""
    user = owner if os.geteuid() == 0 else os.geteuid()
    client = connect(mountpoint, owner=user, silence_s_max=SILENCE_S_MAX)
    if client is None:
        raise LakeError(f"no daemon of {mountpoint} that serves this user answers")
    with client:
        for first in range(0, len(names), NAMES_MAX):
            client.call(protocol.ReadAhead(tuple(names[first : first + NAMES_MAX])))


_MOUNTS = _Mounts()
"""Of the thread in which a worker process reads its samples."""


class _Requester:
    """A thread that names files, so that an iteration does not wait for a daemon."""

    def __init__(self) -> None:
        self._names: list[Path] = []
        self._requests: queue.Queue[list[Path] | None] = queue.Queue(QUEUED_MAX)
        self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)

    def __enter__(self) -> _Requester:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        while True:
            try:
                self._requests.put_nowait(None)
                return
            except queue.Full:
                self._drop_one()

    def add(self, paths: Iterable[Path]) -> None:
        """Name these, some at a time."""
        self._names += paths
        if len(self._names) >= NAMES_MAX:
            self.flush()

    def flush(self) -> None:
        """Name what was added. Of more than a daemon takes the oldest are dropped: they have been read by then."""
        names, self._names = self._names, []
        if self._requests.full():
            self._drop_one()
        self._requests.put_nowait(names)

    def _drop_one(self) -> None:
        try:
            self._requests.get_nowait()
        except queue.Empty:
            pass

    def _run(self) -> None:
        mounts = _Mounts()
        while (names := self._requests.get()) is not None:
            mounts.request_readahead(names)
