"""How many modules one request crosses: fewer are easier to follow, so the bounds only ever go down."""

from __future__ import annotations

from pathlib import Path

from scripts.measure_journeys import measure

CLOSE = 49, 155
RENAME = 42, 1400


async def test_requests_cross_no_more_modules_than_before(tmp_path: Path) -> None:
    """Bounds: modules, and switches with some room for what runs beside."""
    journeys = await measure(tmp_path)
    for name, (modules, switches) in {"close": CLOSE, "rename": RENAME}.items():
        found = journeys[name]
        assert 10 < len(found.modules) <= modules, sorted(found.modules)
        assert found.switches <= switches, f"{name}: {found.switches} switches"
