"""Which checkpoint a file belongs to, by the rules that say ``keep-newest``.

A glob that ends in ``**`` keeps directories: with ``ckpt/**`` every name in ``ckpt`` is one checkpoint, a file or a
directory with all below it; with ``runs/*/ckpt/**`` those of each run are a group of their own, of which the newest
are kept. Any other glob keeps single files: with ``ckpt/*.pt`` each file, of those in one directory the newest. As for
every setting, the last rule that matches a path and says something about it wins; 0 keeps nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lakefs_fuse.config import Rule
from lakefs_fuse.path_rules import translate


@dataclass(frozen=True, slots=True)
class Unit:
    """A checkpoint: all at and below ``path``. Of those with one ``group`` the ``keep`` newest stay."""

    group: str
    path: str
    keep: int


class Units:
    """Compiled rules. Raises ConfigError for a glob that is none."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = [
            (rule.path, _compile(rule.path), rule.keep_newest) for rule in rules if rule.keep_newest is not None
        ]
        self.any = any(keep for _, _, keep in self._rules)

    def of(self, path: str) -> Unit | None:
        """The checkpoint that the file or directory at ``path`` is, or is in; None where nothing is to be kept."""
        if not self.any:
            return None
        for glob, pattern, keep in reversed(self._rules):
            match = pattern.fullmatch(path)
            if match is not None:
                unit = match["unit"] if "unit" in pattern.groupindex else path
                return Unit(f"{glob}\n{unit.rpartition('/')[0]}", unit, keep) if keep else None
        return None


def _compile(glob: str) -> re.Pattern[str]:
    if glob == "**":
        return re.compile(r"(?P<unit>[^/]+)(?:/.+)?", re.DOTALL)
    if glob.endswith("/**"):
        return re.compile(rf"(?P<unit>{translate(glob[:-3])}/[^/]+)(?:/.+)?", re.DOTALL)
    return re.compile(translate(glob), re.DOTALL)
