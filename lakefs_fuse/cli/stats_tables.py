"""Statistics of a daemon as rich tables; values that it does not report are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lakefs_fuse.cli.parameters import format_bytes, format_duration
from lakefs_fuse.cli.stats_values import Values, number, section
from lakefs_fuse.cli.terminal import escaped, table_text
from lakefs_fuse.quantity import counted

FILES_SHOWN_MAX = 20
_FEATURES = (
    "explicit_inval_data", "stateless_opendir", "stateless_open", "noflush", "cache_symlinks", "writeback_cache",
    "passthrough",
)  # fmt: skip
"""Names below ``kernel``, in the order in which they are shown."""


def _items(values: object, *keys: str) -> Sequence[object]:
    """The list at ``keys``, empty if there is none."""
    found = section(values, *keys[:-1]).get(keys[-1])
    return found if isinstance(found, list | tuple) else ()


def render(values: Values, before: Values | None = None, interval_s: float = 1.0) -> RenderableType:
    """All tables; with earlier values also the changes per second since then."""
    parts: list[RenderableType] = [
        _head(values),
        _store(values, before, interval_s),
        _cache(values),
        *_warming(values),
        *_reads(values, before, interval_s),
        *_cluster_cache(values),
        _writing(values),
        *_write_back(values),
        *_listings(values),
        _commits(values),
        *_maintenance(values),
        *_kernel(values),
        _upcalls(values, before, interval_s),
        *_unfinished(values),
        *(Text(f"note: {note}", style="dim") for note in _items(values, "capabilities", "notes")),
    ]
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "path", "state", "id", "error") else "right")
    return table


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")


def _head(values: Values) -> Text:
    mount, daemon = section(values, "mount"), section(values, "daemon")
    access = " (read-only)" if mount.get("read_only") else ""
    state = section(values, "immutable")
    if state:
        of = state.get("dataset") or state.get("snapshot") or _time(number(state, "at_s"))
        access = f" (immutable, as of {of})"
    return Text(
        f"{mount.get('source', '')} on {mount.get('mountpoint', '')}{access}: pid {daemon.get('pid', '?')}, "
        f"up {format_duration(number(daemon, 'uptime_s'))}, "
        f"{format_bytes(number(section(values, 'memory'), 'rss'))} resident"
    )


def _rate(now: float, before: Values | None, key: str, interval_s: float) -> list[str]:
    return [] if before is None else [f"{(now - number(before, key)) / interval_s:,.0f}/s"]


def _store(values: Values, before: Values | None, interval_s: float) -> RenderableType:
    store = section(values, "store")
    counts, sums, most = section(store, "requests"), section(store, "latency_s_sum"), section(store, "latency_s_max")
    earlier = None if before is None else section(before, "store", "requests")
    table = _table("store requests", "", "count", *([] if before is None else ["now"]), "mean", "longest")
    for kind in counts:
        count = number(counts, kind)
        if count:
            mean = format_duration(number(sums, kind) / count)
            rate = _rate(count, earlier, kind, interval_s)
            table.add_row(kind, f"{count:,.0f}", *rate, mean, format_duration(number(most, kind)))
    moved = section(store, "bytes")
    line = (
        f"{format_bytes(number(moved, 'read'))} read, {format_bytes(number(moved, 'written'))} written, "
        f"{counted(number(store, 'retries'), 'retry', 'retries')}, {number(store, 'throttled'):,.0f} throttled, "
        f"{counted(number(store, 'errors'), 'error')}"
    )
    away = [Text("the store does not answer", "bold red")] if store.get("away") else []
    return Group(*away, table, Text(line))


def _cache(values: Values) -> Text:
    hits, misses = number(values, "cache", "hits"), number(values, "cache", "misses")
    ratio = f"{100 * hits / (hits + misses):.1f} % hits" if hits + misses else "no reads yet"
    return Text.assemble(
        ("block cache: ", "bold"),
        f"{ratio} ({counted(hits, 'hit')}, {counted(misses, 'miss', 'misses')}), "
        f"{format_bytes(number(values, 'cache', 'bytes'))} on disk, "
        f"{counted(number(values, 'cache', 'damaged'), 'damaged block')} fetched again",
    )


def _warming(values: Values) -> list[Text]:
    """The warm that runs now."""
    warm = section(values, "warm")
    if not warm.get("running"):
        return []
    return [
        Text.assemble(
            ("warming: ", "bold"),
            f"{number(warm, 'files_done'):,.0f} of {counted(number(warm, 'files_total'), 'file')}, "
            f"{format_bytes(number(warm, 'fetch_bytes_done'))} of {format_bytes(number(warm, 'fetch_bytes_total'))}; "
            f"{number(warm, 'waiting'):,.0f} wait for their turn",
        )
    ]


def _reads(values: Values, before: Values | None, interval_s: float) -> list[RenderableType]:
    """What programs waited for in reads; with ``before``, for how much of each second since then."""
    if not number(values, "reads", "count"):
        return []
    now = [] if before is None else ["waiting now"]
    table = _table("reads", "", "count", "bytes", "store", "disk", "daemon", *now)
    by_rule = section(values, "reads", "by_rule")
    rows = {"all": section(values, "reads"), **{glob: by_rule[glob] for glob in by_rule if glob}}
    for name, counts in rows.items():
        sources, waited = section(counts, "bytes"), section(counts, "waited_s")
        rate = []
        if before is not None:
            earlier = section(before, "reads") if name == "all" else section(before, "reads", "by_rule").get(name, {})
            rate = [f"{(number(counts, 'seconds') - number(earlier, 'seconds')) / interval_s:,.2f} s/s"]
        waits = (format_duration(number(waited, source)) for source in ("store", "disk", "daemon"))
        read = format_bytes(sum(number(sources, source) for source in sources))
        table.add_row(name, f"{number(counts, 'count'):,.0f}", read, *waits, *rate)
    sources = section(values, "reads", "bytes")
    line = ", ".join(f"{format_bytes(number(sources, source))} from {source}" for source in sources)
    return [table, Text(line)]


def _cluster_cache(values: Values) -> list[RenderableType]:
    counts = section(values, "cluster_cache")
    if not number(counts, "requests"):
        return []
    return [
        Text.assemble(
            ("cluster cache: ", "bold"),
            f"{format_bytes(number(counts, 'bytes_read'))} in {counted(number(counts, 'requests'), 'request')}, "
            f"{number(counts, 'hits'):,.0f} hits, {number(counts, 'failures'):,.0f} failed; "
            f"{format_bytes(number(counts, 'bytes_of_store'))} from the store in its place",
        )
    ]


def _writing(values: Values) -> Text:
    return Text.assemble(
        ("not in the store yet: ", "bold"),
        f"{counted(number(values, 'dirty', 'files'), 'file')}, {format_bytes(number(values, 'dirty', 'bytes'))}; ",
        ("uploads: ", "bold"),
        f"{counted(number(values, 'upload', 'parts'), 'part')}, "
        f"{counted(number(values, 'upload', 'publishes'), 'file')}, "
        f"{counted(number(values, 'upload', 'failures'), 'failure')}",
    )


def _write_back(values: Values) -> Iterator[Text]:
    waiting = section(values, "writeback")
    if number(waiting, "accepted") or number(waiting, "files") or number(waiting, "replayed"):
        files = number(waiting, "files")
        why = f", because {waiting['waiting_because']}" if waiting.get("waiting_because") else ""
        yield Text.assemble(
            ("write-back: ", "bold"),
            f"{counted(files, 'file')}, {format_bytes(number(waiting, 'bytes'))}, "
            f"{'waits' if files == 1 else 'wait'} for the store, "
            f"the oldest for {format_duration(number(waiting, 'oldest_s'))}{why}; ",
            f"{number(waiting, 'accepted'):,.0f} acknowledged, {number(waiting, 'failed'):,.0f} failed, ",
            f"{number(waiting, 'replayed'):,.0f} replayed at mount, "
            f"{counted(number(waiting, 'conflicts'), 'conflict')}",
        )
    if number(values, "kept", "checkpoints"):
        yield Text.assemble(
            ("checkpoints kept in the cache: ", "bold"),
            f"{number(values, 'kept', 'checkpoints'):,.0f}, {format_bytes(number(values, 'kept', 'bytes'))}",
        )


def _listings(values: Values) -> Iterator[Text]:
    """The listings in progress."""
    for each in _items(values, "namespace", "listing"):
        row = section(each)
        yield Text.assemble(
            ("listing ", "bold"),
            f"/{escaped(str(row.get('path') or ''))}: {counted(number(row, 'names'), 'name')} in "
            f"{counted(number(row, 'pages'), 'page')}, "
            f"{counted(number(row, 'requests_under_way'), 'request')} in flight, "
            f"{format_duration(number(row, 'age_s'))}",
        )


def _commits(values: Values) -> Text:
    commits = section(values, "commits")
    return Text.assemble(
        ("commits: ", "bold"),
        f"{number(commits, 'written'):,.0f} written, {number(commits, 'applied'):,.0f} applied, "
        f"{counted(number(commits, 'operations_waiting'), 'change')} waiting, "
        f"last {number(commits, 'lag_s'):.1f} s behind; ",
        ("packs: ", "bold"),
        f"{counted(number(commits, 'files_packed'), 'file')} in {number(commits, 'packs'):,.0f} from here, "
        f"{format_bytes(number(commits, 'pack_bytes_live'))} live, "
        f"{format_bytes(number(commits, 'pack_bytes_dead'))} dead in {number(commits, 'packs_known'):,.0f} known",
    )


def _maintenance(values: Values) -> Iterator[Text]:
    found = section(values, "maintenance")
    if found.get("mode") != "auto":
        return
    if found.get("inspected_s") is None:
        yield Text.assemble(("maintenance: ", "bold"), "not looked at yet")
        return

    def at(key: str) -> str:
        return "never" if found.get(key) is None else _time(number(found, key))

    state = f", running: {found['running']}" if found.get("running") else ""
    held = f", held by {found['holder']}" if found.get("holder") else ""
    yield Text.assemble(
        ("maintenance: ", "bold"),
        f"last fold {at('last_fold_s')}, last collection {at('last_collection_s')}, "
        f"{counted(number(found, 'backlog'), 'commit')} newer than the index{state}{held}",
    )
    if found.get("overdue"):
        why = f" ({found['overdue_because']})" if found.get("overdue_because") else ""
        overdue = f"overdue for {format_duration(number(found, 'due_for_s'))}: {found.get('due')}{why}"
        yield Text(overdue, style="red")
    elif found.get("last_error"):
        yield Text(f"maintenance failed: {found['last_error']}", style="red")


def _kernel(values: Values) -> Iterator[Text]:
    kernel = section(values, "kernel")
    if not kernel:
        return
    on = ["hooks" if kernel.get("hooks") else "no hooks", *(name for name in _FEATURES if kernel.get(name) is True)]
    ahead = f"read-ahead {number(kernel, 'read_ahead_kib'):,.0f} KiB"
    yield Text.assemble(("kernel: ", "bold"), ", ".join([*on, ahead]))
    yield from (Text(f"missing: {each}", style="dim") for each in _items(kernel, "missing"))


def _upcalls(values: Values, before: Values | None, interval_s: float) -> RenderableType:
    counts = section(values, "upcalls")
    earlier = None if before is None else section(before, "upcalls")
    table = _table("FUSE requests", "", "count", *([] if before is None else ["now"]))
    for name in sorted(counts, key=lambda name: -number(counts, name)):
        count = number(counts, name)
        if count:
            table.add_row(name, f"{count:,.0f}", *_rate(count, earlier, name, interval_s))
    return table


def _unfinished(values: Values) -> Iterator[Table]:
    files = _items(values, "unfinished")
    if not files:
        return
    table = _table("files not in the store", "id", "path", "state", "bytes", "stored", "age", "error")
    for file in files[:FILES_SHOWN_MAX]:
        row = section(file)
        table.add_row(
            *(table_text(str(row.get(key, ""))) for key in ("id", "path", "state")),
            format_bytes(number(row, "bytes")),
            format_bytes(number(row, "bytes_done")),
            format_duration(number(row, "age_s")),
            table_text(str(row.get("error", ""))),
        )
    if len(files) > FILES_SHOWN_MAX:
        table.caption = f"and {len(files) - FILES_SHOWN_MAX} more"
    yield table
