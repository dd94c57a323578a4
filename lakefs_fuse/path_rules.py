"""Path rules: settings of a mount that differ from one path of the lake to another, read from a TOML file.

```toml
[[rule]]
path = "ckpt/**"             # a glob on the path in the lake
pack = "never"               # auto | always | never
pack-threshold = "256KiB"
durability = "writeback"     # close | writeback
keep-newest = 1              # this many of the newest checkpoints stay in the local cache
exclusive-create = "store"   # store | cache: who says that a name is free for O_EXCL
publish = "10s"              # store a file so often while it is being written; 0 is never
```

For each setting the last rule that matches and says something about it wins; where none does, the mount's own option
holds. `stats` counts READ requests by the last rule that matches, and a rule may be there for that alone. In a glob
``*`` and ``?`` stay within a component, ``[a-z]`` and ``[!a-z]`` are one character, and ``**`` as a whole component is
any number of components: ``ckpt/**`` is everything below ``ckpt``, ``**/*.json`` every JSON file. Braces are characters
as any other: names may have them.

The file is read once, by the command line, into `config.Rule`s that travel in the mount's configuration; `Rules` is
their compiled form. `Rules` is immutable but for a bounded cache of answers, and may be asked from any thread.

A new setting is: a field of `config.Rule` and of `_Table` here, its check in `_rule`, and a method of `Rules`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from lakefs_fuse.config import (
    DURABILITIES,
    DURATION_S_MAX,
    EXCLUSIVE_CREATES,
    PACK_MODES,
    PACK_THRESHOLD_BYTES_MAX,
    PUBLISH_S_MIN,
    MountConfig,
    Rule,
    parse_duration,
    parse_size,
)
from lakefs_fuse.errors import ConfigError

FILE_BYTES_MAX = 128 * 1024
"""Escaped as JSON it still fits what the daemon reads."""
RULES_MAX = 1000
KEEP_NEWEST_MAX = 100
ANSWERS_MAX = 4096
"""Paths whose answer is remembered."""


class PackPolicy(msgspec.Struct, frozen=True):
    """Whether a file goes into a pack: ``mode`` is auto, always or never, and applies up to ``threshold_bytes``."""

    mode: str
    threshold_bytes: int


class _Settings(NamedTuple):
    """What holds for one path."""

    pack: PackPolicy
    durability: str
    exclusive_create: str
    publish_s: float
    glob: str = ""


class Rules:
    """What holds for a path of the lake (relative, no leading slash)."""

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        pack: str,
        pack_threshold_bytes: int,
        durability: str = "close",
        publish_s: float = 0.0,
    ) -> None:
        """The other arguments hold where no rule says otherwise. Raises ConfigError for a glob that is none."""
        self._rules = [(re.compile(translate(rule.path), re.DOTALL), rule) for rule in rules]
        self._default = _Settings(PackPolicy(pack, pack_threshold_bytes), durability, "", publish_s)
        self.publishes_open_files = publish_s > 0 or any(rule.publish_s for rule in rules)
        """Files at some path are stored while they are being written."""
        self.asks_store_anywhere = durability != "writeback" or any(
            rule.durability == "close" or rule.exclusive_create == "store" for rule in rules
        )
        """O_EXCL may ask the store at some path."""
        self._merged = lru_cache(ANSWERS_MAX)(self._merge)

    @classmethod
    def of(cls, config: MountConfig) -> Rules:
        return cls(
            config.rules,
            pack=config.pack,
            pack_threshold_bytes=config.pack_threshold_bytes,
            durability=config.durability,
            publish_s=config.publish_s,
        )

    def is_writeback(self, path: str) -> bool:
        """Whether close() of the file at ``path`` waits for the local disk only."""
        return self._merged(path).durability == "writeback"

    def asks_store_for_exclusive_create(self, path: str) -> bool:
        """Whether O_EXCL asks the store for the name, or relies on what this node knows. Where no rule says so,
        the store is asked unless the path is under write-back."""
        settings = self._merged(path)
        return (settings.exclusive_create or ("cache" if settings.durability == "writeback" else "store")) == "store"

    def publish_s(self, path: str) -> float:
        """The interval at which the file at ``path`` is stored while it is being written; 0 is never."""
        return self._merged(path).publish_s

    def glob_of(self, path: str) -> str:
        """The last rule that matches, by its glob; empty where none does."""
        return self._merged(path).glob

    def pack_for(self, path: str) -> PackPolicy:
        """How the file at ``path`` is packed."""
        return self._merged(path).pack

    def _merge(self, path: str) -> _Settings:
        mode, threshold_bytes = self._default.pack.mode, self._default.pack.threshold_bytes
        _, durability, exclusive_create, publish_s, glob = self._default
        for pattern, rule in self._rules:
            if pattern.fullmatch(path):
                glob = rule.path
                mode = rule.pack or mode
                threshold_bytes = threshold_bytes if rule.pack_threshold_bytes is None else rule.pack_threshold_bytes
                durability = rule.durability or durability
                exclusive_create = rule.exclusive_create or exclusive_create
                publish_s = publish_s if rule.publish_s is None else rule.publish_s
        return _Settings(PackPolicy(mode, threshold_bytes), durability, exclusive_create, publish_s, glob)


# -- the file --------------------------------------------------------------------------------------------------------


class _Table(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """One ``[[rule]]`` as it is written; msgspec refuses keys and types that are not here."""

    path: str
    pack: str | None = None
    pack_threshold: int | str | None = None
    durability: str | None = None
    keep_newest: int | None = None
    exclusive_create: str | None = None
    publish: float | str | None = None


ACCEPTED_KEYS = tuple(field.encode_name for field in msgspec.structs.fields(_Table))


def read_rules(file: str | Path) -> tuple[Rule, ...]:
    """The rules of a TOML file, in order. Raises ConfigError that says where in the file, and what is accepted."""
    try:
        with open(file, "rb") as source:
            raw = source.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"rules file {file} cannot be read ({error.strerror}): check --rules") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"rules file {file}: more than {FILE_BYTES_MAX} bytes")
    return parse_rules(raw, str(file))


def parse_rules(raw: bytes, name: str) -> tuple[Rule, ...]:
    """As `read_rules`; ``name`` is for messages."""
    try:
        text = raw.decode()
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of bytes that are not UTF-8, and numbers of 5,000 digits, too
        raise ConfigError(f"rules file {name} is not TOML: {error}") from error
    for key in document:
        if key != "rule":
            raise ConfigError(f"rules file {name}: unknown key {key!r}: only [[rule]] tables are accepted")
    tables = document.get("rule", [])
    if not isinstance(tables, list):
        raise ConfigError(f"rules file {name}: write [[rule]], with two brackets, before each rule")
    if len(tables) > RULES_MAX:
        raise ConfigError(f"rules file {name}: {len(tables)} rules; at most {RULES_MAX}")
    lines = [at for at, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)]
    rules = []
    for index, table in enumerate(tables):
        line = f" (line {lines[index]})" if len(lines) == len(tables) else ""
        try:
            rules.append(_rule(table))
        except ConfigError as error:
            raise ConfigError(f"rules file {name}: rule {index + 1}{line}: {error}") from error
    return tuple(rules)


def _rule(table: object) -> Rule:
    try:
        given = msgspec.convert(table, _Table)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}; accepted keys are {', '.join(ACCEPTED_KEYS)}") from error
    re.compile(translate(given.path))
    if given.pack is not None and given.pack not in PACK_MODES:
        raise ConfigError(f"pack {given.pack!r}: expected {', '.join(PACK_MODES[:-1])} or {PACK_MODES[-1]}")
    if given.durability is not None and given.durability not in DURABILITIES:
        raise ConfigError(f"durability {given.durability!r}: expected {' or '.join(DURABILITIES)}")
    if given.exclusive_create is not None and given.exclusive_create not in EXCLUSIVE_CREATES:
        raise ConfigError(f"exclusive-create {given.exclusive_create!r}: expected {' or '.join(EXCLUSIVE_CREATES)}")
    if given.keep_newest is not None and not 0 <= given.keep_newest <= KEEP_NEWEST_MAX:
        raise ConfigError(f"keep-newest {given.keep_newest}: expected 0 to {KEEP_NEWEST_MAX}")
    publish_s = parse_duration(given.publish) if isinstance(given.publish, str) else given.publish
    if publish_s is not None:
        check_publish(publish_s, "publish")
    threshold = given.pack_threshold
    if isinstance(threshold, str):
        threshold = parse_size(threshold)
    if threshold is not None:
        check_pack_threshold(threshold, "pack-threshold")
    return Rule(
        path=given.path,
        pack=given.pack,
        pack_threshold_bytes=threshold,
        durability=given.durability,
        keep_newest=given.keep_newest,
        exclusive_create=given.exclusive_create,
        publish_s=publish_s,
    )


def check_pack_threshold(size: int, what: str) -> None:
    """Raises ConfigError; ``what`` names the option or key."""
    if not 0 <= size <= PACK_THRESHOLD_BYTES_MAX:
        raise ConfigError(f"{what} {size}: expected 0 to {PACK_THRESHOLD_BYTES_MAX >> 20}MiB, the size packs aim at")


def check_publish(seconds: float, what: str) -> None:
    """Raises ConfigError; ``what`` names the option or key."""
    if seconds and not PUBLISH_S_MIN <= seconds <= DURATION_S_MAX:  # also where it is no number
        raise ConfigError(f"{what} {seconds:g}: expected 0, or {PUBLISH_S_MIN:g} s or more, ten years at most")


# -- globs -----------------------------------------------------------------------------------------------------------


def translate(glob: str) -> str:
    """A regular expression for `re.fullmatch` (with re.DOTALL). Raises ConfigError."""
    if not glob or glob.startswith("/") or glob.endswith("/"):
        raise ConfigError(f"path {glob!r}: a path in the lake has no slash at its ends; dir/** is all below dir")
    components = glob.split("/")
    pattern = ""
    for index, component in enumerate(components):
        last = index == len(components) - 1
        if component == "**":
            if index and components[index - 1] == "**":
                raise ConfigError(f"path {glob!r}: ** twice in a row says no more than once")
            pattern += ".+" if last else "(?:[^/]+/)*"
        elif component in ("", ".", ".."):
            raise ConfigError(f"path {glob!r}: a path in the lake has no empty, '.' or '..' component")
        elif "**" in component:
            raise ConfigError(f"path {glob!r}: ** is a component of its own: a/**/b")
        else:
            pattern += _translate_component(component, glob) + ("" if last else "/")
    return pattern


def _translate_component(component: str, glob: str) -> str:
    pattern, at = "", 0
    while at < len(component):
        character = component[at]
        at += 1
        if character == "*":
            pattern += "[^/]*"
        elif character == "?":
            pattern += "[^/]"
        elif character == "[":
            # As in fnmatch(3): a ] right after the opening stands for itself.
            start = at + (component[at : at + 1] == "!")
            end = component.find("]", start + 1)
            if end < 0:
                raise ConfigError(f"path {glob!r}: [ without ]; write [[] for the character itself")
            inside = component[start:end].replace("\\", "\\\\").replace("[", "\\[").replace("^", "\\^")
            inside = inside.replace("&", "\\&").replace("~", "\\~").replace("|", "\\|")
            pattern += f"(?![/])[{'^' if start > at else ''}{inside}]"
            at = end + 1
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"path {glob!r}: [{component[start:end]}]: {error}") from error
        else:
            pattern += re.escape(character)
    return pattern
