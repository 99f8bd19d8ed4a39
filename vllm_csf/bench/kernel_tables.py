"""Tables and figures of a record of the kernels. Needs nothing but the record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .geometries import ARMS
from .plot import Chart, Point, svg

Row = dict[str, Any]
# What decoding is to reach: this share of the copy rate, and so much for launches.
TARGET_SHARE, TARGET_US = 0.85, 8.0
TARGET_TOKENS = 128


def groups(record: dict[str, Any]) -> dict[tuple[str, str], dict[int, dict[str, Row]]]:
    """(geometry, routing) -> tokens -> arm -> row, in the order of the record."""
    found: dict[tuple[str, str], dict[int, dict[str, Row]]] = {}
    for row in record["rows"]:
        by_tokens = found.setdefault((row["geometry"], row["routing"]), {})
        by_tokens.setdefault(row["tokens"], {})[row["arm"]] = row
    return found


def target_us(row: Row, copy_gb_s: float | None) -> float | None:
    """Of one to 128 tokens: the bytes of the experts hit at 85 % of the copy rate, and 8 microseconds."""
    if not copy_gb_s or row["tokens"] > TARGET_TOKENS:
        return None
    return row["gb_s"] * row["us"] / (TARGET_SHARE * copy_gb_s) + TARGET_US


def markdown(record: dict[str, Any]) -> str:
    """Where and how it was measured, then a table for each geometry and routing."""
    copy = record["machine"].get("copy_gb_s")
    parts = [_head(record)]
    for (geometry, routing), by_tokens in groups(record).items():
        row = next(iter(next(iter(by_tokens.values())).values()))
        parts.append(
            f"### {geometry}, {routing} routing\n\nE {row['E']}, H {row['H']}, I {row['I']}, "
            f"top {row['topk']}. Microseconds.\n\n{_table(by_tokens, copy)}"
        )
    return "\n\n".join(parts) + "\n"


def _head(record: dict[str, Any]) -> str:
    about, protocol = record["machine"], record.get("protocol", {})
    versions = ", ".join(f"{k} {v}" for k, v in about.get("versions", {}).items() if v)
    gpus = about.get("gpus") or [{}]
    driver = f", driver {gpus[0]['driver']}" if "driver" in gpus[0] else ""
    lines = [
        f"{about.get('gpu')}{driver}, device copy {about.get('copy_gb_s')} GB/s, commit {record['commit']}; "
        f"{versions}."
    ]
    if protocol:
        lines.append(
            f"{protocol['what'].capitalize()}; {100 * protocol['exceptions']:g} % exceptions; a graph "
            f"that does nothing shows {protocol['floor_us']} µs."
        )
    for check in record.get("checks", []):
        if check.get("equals_native") is False:
            lines.append(f"**{check['geometry']}: csf and native differ.**")
    lines += [f"No {arm} arm: {reason}." for arm, reason in record.get("skipped", {}).items()]
    lines += [f"Failed: {failure}." for failure in record.get("failures", [])]
    return "\n\n".join(lines)


def _table(by_tokens: dict[int, dict[str, Row]], copy: float | None) -> str:
    head = ["tokens", *ARMS, "csf / native", "marlin / csf", "target", "csf GB/s", "csf TFLOP/s"]
    lines = [f"| {' | '.join(head)} |", f"|{' ---: |' * len(head)}"]
    for tokens, found in sorted(by_tokens.items()):
        csf = found.get("csf")
        cells = [str(tokens), *(_us(found.get(arm)) for arm in ARMS)]
        cells += [_ratio(csf, found.get("native")), _ratio(found.get("marlin"), csf)]
        target = target_us(csf, copy) if csf else None
        cells.append("" if target is None else f"{target:.1f}")
        cells += [f"{csf['gb_s']:.0f}", f"{csf['tflop_s']:.1f}"] if csf else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _us(row: Row | None) -> str:
    return "" if row is None else f"{row['us']:.1f}"


def _ratio(a: Row | None, b: Row | None) -> str:
    return "" if a is None or b is None else f"{a['us'] / b['us']:.3f}"


def figure(record: dict[str, Any]) -> str:
    """SVG: for each geometry and routing the arms' times, and beside them what csf gains on the others."""
    charts = []
    for (geometry, routing), by_tokens in groups(record).items():
        title = f"{geometry}, {routing}"
        times = {
            arm: [_bar(found[arm]) for found in by_tokens.values() if arm in found]
            for arm in ARMS
            if any(arm in found for found in by_tokens.values())
        }
        charts.append(Chart(title, "tokens", "µs", times, log_y=True))
        gains = {
            f"{arm} / csf": _gains(by_tokens.values(), arm)
            for arm in ARMS[1:]
            if arm in times and "csf" in times
        }
        charts.append(Chart(f"{title}: gain", "tokens", "times as fast", gains, reference=1.0))
    return svg(charts)


def _bar(row: Row) -> Point:
    return Point(row["tokens"], row["us"], row["us_min"], row["us_max"])


def _gains(points: Iterable[dict[str, Row]], arm: str) -> list[Point]:
    found = [(p["csf"]["tokens"], p[arm]["us"] / p["csf"]["us"]) for p in points if {arm, "csf"} <= set(p)]
    return [Point(tokens, gain, gain, gain) for tokens, gain in found]
