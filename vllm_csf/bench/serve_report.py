"""Tables, figures and comparisons of records of serving. Needs nothing but records."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .plot import Chart, Point, svg
from .statistics import Ratio, independent_ratio, ratio, spread

Row = dict[str, Any]
Cell = tuple[str, int, int, int]  # speculation, prompt, output, concurrency
# Name, unit, whether more is better.
MEASURES = {
    "output_tok_s": ("output tokens/s", True),
    "steps_s": ("engine steps/s", True),
    "median_ttft_ms": ("TTFT ms", False),
    "median_tpot_ms": ("TPOT ms", False),
}
STARTS = {
    "others_up": "others up",
    "start_seconds": "start s",
    "load_seconds": "load s",
    "weights_gib": "weights GiB",
    "kv_tokens": "KV tokens",
    "device_mib": "device MiB",
    "host_peak_mib": "host MiB",
}


def cells(record: dict[str, Any]) -> dict[Cell, dict[str, list[Row]]]:
    """(speculation, prompt, output, concurrency) -> arm -> its windows, in order of rounds."""
    found: dict[Cell, dict[str, list[Row]]] = {}
    for row in record["windows"]:
        cell = (row["speculation"], row["prompt"], row["output"], row["concurrency"])
        found.setdefault(cell, {}).setdefault(row["arm"], []).append(row)
    for arms in found.values():
        for rows in arms.values():
            rows.sort(key=lambda row: (row["round"], row["repeat"]))
    return found


def arms_of(record: dict[str, Any]) -> list[str]:
    known = record["settings"]["arms"]
    return [name for name in known if any(row["arm"] == name for row in record["windows"])]


def compared(rows: dict[str, list[Row]], arm: str, base: str, measure: str) -> Ratio | None:
    """Over the rounds that both have."""
    by_turn = [
        {(row["round"], row["repeat"]): row[measure] for row in rows.get(name, []) if row.get(measure)}
        for name in (arm, base)
    ]
    common = sorted(set(by_turn[0]) & set(by_turn[1]))
    if not common:
        return None
    return ratio([by_turn[0][turn] for turn in common], [by_turn[1][turn] for turn in common])


# ---- tables ----------------------------------------------------------------------------------------

Table = tuple[str, list[str], list[list[str]]]  # title, head, rows


def tables(record: dict[str, Any]) -> list[Table]:
    arms = arms_of(record)
    return [_starts(record, arms), _windows(record, arms), *_ratios(record, arms)]


def _starts(record: dict[str, Any], arms: Sequence[str]) -> Table:
    rows = []
    for speculation in dict.fromkeys(start["speculation"] for start in record["starts"]):
        for arm in arms:
            mine = [s for s in record["starts"] if (s["speculation"], s["arm"]) == (speculation, arm)]
            if mine:
                cells = [_start_cell([s.get(key) for s in mine]) for key in STARTS]
                rows.append([speculation, arm, *cells])
    return "Starts", ["speculation", "arm", *STARTS.values()], rows


def _start_cell(values: Iterable[float | None]) -> str:
    known = [v for v in values if v is not None]
    middle = statistics.median(known) if known else 0
    return "" if not known else f"{middle:,.0f}" if middle >= 1000 else f"{middle:.4g}"


def _windows(record: dict[str, Any], arms: Sequence[str]) -> Table:
    head = ["speculation", "prompt", "output", "requests", "arm", "rounds"]
    head += [name for name, _ in MEASURES.values()] + ["accepted", "spread"]
    rows = []
    for (speculation, prompt, output, concurrency), found in cells(record).items():
        for arm in arms:
            if mine := found.get(arm):
                middle = [_median(mine, measure) for measure in MEASURES]
                accepted = _median(mine, "acceptance")
                wide = spread([row["output_tok_s"] for row in mine])
                case = [speculation, *map(str, (prompt, output, concurrency)), arm, str(len(mine))]
                rows.append([*case, *middle, accepted, f"{100 * wide:.1f} %"])
    return "Medians over the rounds; spread of output tokens/s", head, rows


def _median(rows: Sequence[Row], measure: str) -> str:
    values = [row[measure] for row in rows if row.get(measure) is not None]
    return f"{statistics.median(values):.4g}" if values else ""


def _ratios(record: dict[str, Any], arms: Sequence[str]) -> list[Table]:
    pairs = [(arm, base) for arm, base in (("csf", "stock"), ("native", "stock"), ("csf", "native"))]
    pairs = [pair for pair in pairs if set(pair) <= set(arms)]
    found = []
    for measure in ("output_tok_s", "steps_s", "median_ttft_ms"):
        name, more = MEASURES[measure]
        rows = []
        for cell, windows in cells(record).items():
            values = [compared(windows, arm, base, measure) for arm, base in pairs]
            rows.append([cell[0], *map(str, cell[1:]), *("" if v is None else str(v) for v in values)])
        title = f"Ratio of {name} ({'more' if more else 'less'} is better), 95 % interval"
        head = ["speculation", "prompt", "output", "requests", *(f"{arm} / {base}" for arm, base in pairs)]
        if pairs:
            found.append((title, head, rows))
    return found


def notes(record: dict[str, Any]) -> list[str]:
    """Where and how it was measured, and what there is to hold against it."""
    about, settings = record["machine"], record["settings"]
    rounds = len({row["round"] for row in record["windows"]})
    gpus = about.get("gpus") or [{}]
    versions = ", ".join(f"{k} {v}" for k, v in about.get("versions", {}).items() if v)
    lines = [
        f"{about.get('gpu') or about.get('cpu')}"
        + (f", driver {gpus[0]['driver']}" if "driver" in gpus[0] else "")
        + f"; commit {record['commit']}; {versions}.",
        f"Checkpoint {record['checkpoint']['name']}, SHA-256 {record['checkpoint'].get('sha256', '')[:16]}.",
        f"{rounds} rounds of {settings['repeats']} windows, "
        + (
            "all servers up side by side, started "
            + ("overlapping" if settings.get("overlap_starts") else "one after the other")
            if settings["together"]
            else "a server at a time"
        )
        + f", {settings['waves']} requests for each that runs at a time, temperature "
        f"{settings['temperature']:g}, no prefix caching.",
    ]
    if settings.get("uniform_routing"):
        lines.append("Tokens go to experts at random (vLLM's simulation), in all arms alike.")
    if "mtp" in settings["speculations"]:
        made_up = settings["synthetic_acceptance"]
        how = "as the model drafts" if made_up is None else f"made up: {made_up:g} tokens a step"
        lines.append(f"MTP: {settings['speculative_tokens']} speculative tokens, acceptance {how}.")
    lines += [f"No {arm} arm: {reason}." for arm, reason in record["skipped"].items()]
    lines += [
        f"Failed: {f.get('arm')}, speculation {f.get('speculation')}: {f['error'].splitlines()[0]}"
        for f in record["failures"]
    ]
    known = [compared(windows, "csf", "native", "output_tok_s") for windows in cells(record).values()]
    decided = [value.decided for value in known if value is not None]
    if not all(decided):
        lines.append(
            f"csf and native: in {decided.count(False)} of {len(decided)} cases the noise is larger than the "
            "difference."
        )
    return lines


def text(record: dict[str, Any]) -> str:
    """Markdown, aligned so that it reads in a terminal."""
    parts = ["\n".join(notes(record))]
    parts += [f"{title}\n\n{aligned(head, rows)}" for title, head, rows in tables(record) if rows]
    return "\n\n".join(parts) + "\n"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are in line."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


# ---- pictures --------------------------------------------------------------------------------------


def charts(record: dict[str, Any]) -> list[Chart]:
    """For each speculation and length: throughput, gain on the other arms, time to the first token."""
    arms, found = arms_of(record), cells(record)
    out = []
    for speculation, prompt, output in dict.fromkeys(cell[:3] for cell in found):
        mine = {cell[3]: rows for cell, rows in found.items() if cell[:3] == (speculation, prompt, output)}
        title = f"{prompt} + {output} tokens, speculation {speculation}"
        for measure in ("output_tok_s", "median_ttft_ms"):
            series = {
                arm: [_point(n, rows[arm], measure) for n, rows in mine.items() if arm in rows]
                for arm in arms
            }
            out.append(Chart(title, "requests at a time", MEASURES[measure][0], series))
        gains = {f"csf / {base}": _gains(mine, base) for base in arms if base != "csf"}
        out.append(
            Chart(f"{title}: gain", "requests at a time", "times the output tokens/s", gains, reference=1.0)
        )
    return out


def _point(concurrency: int, rows: Sequence[Row], measure: str) -> Point:
    values = [row[measure] for row in rows]
    return Point(concurrency, statistics.median(values), min(values), max(values))


def _gains(mine: dict[int, dict[str, list[Row]]], base: str) -> list[Point]:
    found = ((n, compared(rows, "csf", base, "output_tok_s")) for n, rows in mine.items())
    return [
        Point(n, r.value, r.value if r.low is None else r.low, r.value if r.high is None else r.high)
        for n, r in found
        if r is not None
    ]


STYLE = (
    "body{font:14px system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;border-bottom:1px solid #ddd;"
    "text-align:right}th{text-align:right}td:first-child,th:first-child{text-align:left}"
    "pre{white-space:pre-wrap;background:#f6f6f6;padding:1em}"
)


def html(record: dict[str, Any]) -> str:
    """A page that needs nothing else."""
    parts = [f"<h1>Serving {escape(record['checkpoint']['name'])}</h1>"]
    parts += [f"<p>{escape(line)}</p>" for line in notes(record)]
    parts += [svg(charts(record), columns=3)]
    for title, head, rows in tables(record):
        parts.append(f"<h2>{escape(title)}</h2><table><tr>{_cells('th', head)}</tr>")
        parts += [f"<tr>{_cells('td', row)}</tr>" for row in rows]
        parts.append("</table>")
    for start in record["starts"]:
        said = "\n".join(start.get("plugin", []))
        if said:
            parts.append(f"<p>{escape(start['arm'])} said at start:</p><pre>{escape(said)}</pre>")
    for failure in record["failures"]:
        parts.append(
            f"<h2>Failed: {escape(str(failure.get('arm')))}</h2><pre>{escape(failure['error'])}</pre>"
        )
    about = f'<meta charset="utf-8"><title>vllm-csf bench serve</title><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{about}</head><body>{''.join(parts)}</body></html>\n"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


# ---- two records -----------------------------------------------------------------------------------


def in_common(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[Cell, str]]:
    """The cases, with their arms, that both records have."""
    old, new = cells(before), cells(after)
    return [(cell, arm) for cell in old if cell in new for arm in old[cell] if arm in new[cell]]


def comparison(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What changed from one record to the other, for the cases that both have."""
    old, new = cells(before), cells(after)
    head = ["speculation", "prompt", "output", "requests", "arm"]
    head += [f"{MEASURES[m][0]}, new / old" for m in ("output_tok_s", "steps_s", "median_ttft_ms")]
    rows = []
    for cell, arm in in_common(before, after):
        line = [cell[0], *map(str, cell[1:]), arm]
        for measure in ("output_tok_s", "steps_s", "median_ttft_ms"):
            a, b = ([r[measure] for r in x[cell][arm] if r.get(measure)] for x in (new, old))
            line.append(str(independent_ratio(a, b)) if a and b else "")
        rows.append(line)
    differ = [
        f"{name}: {a} and {b}"
        for name, a, b in (
            ("gpu", before["machine"].get("gpu"), after["machine"].get("gpu")),
            ("commit", before["commit"], after["commit"]),
            ("checkpoint", before["checkpoint"].get("sha256"), after["checkpoint"].get("sha256")),
            ("versions", before["machine"].get("versions"), after["machine"].get("versions")),
        )
        if a != b
    ]
    said = "\n".join(f"Different {line}" for line in differ)
    if not rows:
        return f"{said}\nThe records have no case in common.\n".lstrip()
    return f"{said}\n\n{aligned(head, rows)}\n".lstrip()
