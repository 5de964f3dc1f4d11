"""Rows as aligned text."""

from __future__ import annotations

from collections.abc import Sequence

from .grid import Spread
from .measure import Row

HEADINGS = ("method", "entries a row", "budget", "matrix error", "output error", "time", "speed-up")
GRID_HEADINGS = ("method", "budget", "least", "median", "most", "worst draw")


def format_table(rows: list[Row], about: dict[str, str]) -> str:
    """One block a data set; the speed-up is over the first row of the block, fused softmax."""
    blocks = []
    width = max(len(row.method) for row in rows)
    for data, text in about.items():
        part = [row for row in rows if row.data == data]
        blocks.append(block(f"{data}: {text}", HEADINGS, [_cells(row, part[0].seconds) for row in part], width))
    return "\n\n".join(blocks)


def format_grid(spreads: list[Spread], title: str) -> str:
    lines = [(s.method, f"{s.budget:.3f}", number(s.least), number(s.median), number(s.most), number(s.worst_draw)) for s in spreads]
    return block(title, GRID_HEADINGS, lines, max(len(s.method) for s in spreads))


def _cells(row: Row, fused: float) -> tuple[str, ...]:
    matrix = "exact" if row.matrix_error is None else number(row.matrix_error)
    return (
        row.method,
        f"{row.entries:,.0f}",
        f"{row.budget:.3f}",
        matrix,
        number(row.output_error),
        f"{1e3 * row.seconds:,.1f} ms",
        f"{fused / row.seconds:.2f}x",
    )


def number(error: float) -> str:
    return f"{error:.3f}" if error >= 1e-3 else f"{error:.0e}"


def block(title: str, headings: tuple[str, ...], lines: Sequence[tuple[str, ...]], width: int) -> str:
    return "\n".join([title, *(_line(line, headings, width) for line in (headings, *lines))])


def _line(cells: tuple[str, ...], headings: tuple[str, ...], width: int) -> str:
    return "  " + cells[0].ljust(width) + "".join(c.rjust(max(12, len(h) + 2)) for c, h in zip(cells[1:], headings[1:], strict=True))
