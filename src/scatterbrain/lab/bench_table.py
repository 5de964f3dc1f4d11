"""A benchmark's record as aligned text."""

from __future__ import annotations

from .record import BOTH, FORWARD, Record, Row
from .table import block, number

HEADINGS = ("method", "entries a row", "matrix error", "output error", "forward", "x SDPA", "of FLOPs", "fwd + bwd", "x SDPA", "peak fwd", "peak f+b")


def format_record(record: Record) -> str:
    """A block for each case, then what was left out and why."""
    places = dict.fromkeys((row.data, row.length) for row in record.rows.values())
    width = max((len(row.label) for row in record.rows.values()), default=10)
    blocks = [format_case(record, data, length, width) for data, length in places]
    return "\n\n".join([*blocks, explain(record), *format_skips(record)])


def format_case(record: Record, data: str, length: int, width: int) -> str:
    rows = [row for row in record.rows.values() if (row.data, row.length) == (data, length)]
    base = next((row for row in rows if row.method == "sdpa"), None)
    return block(f"{data}, {length:,} tokens: {record.about.get(data, '')}", HEADINGS, [cells(row, base) for row in rows], width)


def cells(row: Row, base: Row | None) -> tuple[str, ...]:
    ratio = speedup(row, base, FORWARD)
    return (
        row.label,
        f"{row.entries:,.0f}",
        ("exact" if row.kind == "exact" else "-") if row.matrix_error is None else number(row.matrix_error),
        "-" if row.output_error is None else number(row.output_error),
        milliseconds(row.seconds(FORWARD)),
        times(ratio),
        f"{ratio / row.flop_ratio:.0%}" if ratio and row.flop_ratio else "-",
        milliseconds(row.seconds(BOTH)),
        times(speedup(row, base, BOTH)),
        mebibytes(row.peak(FORWARD)),
        mebibytes(row.peak(BOTH)),
    )


def speedup(row: Row, base: Row | None, what: str) -> float | None:
    mine, theirs = row.seconds(what), base.seconds(what) if base else None
    return theirs / mine if mine and theirs else None


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.1f} ms"


def mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.1f} MiB"


def explain(record: Record) -> str:
    config, hardware = record.header["config"], record.header["hardware"]
    return "\n".join(
        (
            f"{hardware['processor']}, {hardware['threads']} threads, {config['dtype']}; times are medians of {config['repeats']}, taken in turns,",
            "selection and sampling included; x SDPA is how many times faster than fused softmax in the same run; of FLOPs is the share of what",
            "the count of operations would allow. Errors are relative Frobenius to exact attention, mean over heads; above 2,048 tokens the",
            "matrix error is estimated from 64 random vectors (its standard error is in the record). Peaks are beyond the inputs, each in a",
            "process of its own. Before it was timed every method returned finite numbers, and agreed with its dense definition where one is at",
            "hand: all of ours, exact attention, and some packages (agreement, in the record).",
        )
    )


def format_skips(record: Record) -> list[str]:
    """One line a reason, with the lengths it holds for."""
    lines: dict[tuple[str, str, str, str], list[int]] = {}
    for s in record.skips:
        lines.setdefault((s.data, s.method, s.what, s.reason), []).extend([s.length] if s.length else [])
    said = []
    for (data, method, what, reason), at in lines.items():
        where = f"{data} at {', '.join(f'{n:,}' for n in sorted(at))}" if at else data
        part = "" if what == "all" else f", {what.replace('_', ' + ')}"
        said.append(f"  {where}: {method}{part}: {reason}" if method != "all" else f"  {where}: {reason}")
    return ["\n".join(["Left out:", *said])] if said else []
