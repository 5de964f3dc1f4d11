"""The demo's figure: the errors over Process 1's grid, then errors and time of each method, a row of panels a data set."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .extras import need
from .grid import BETA_FACTORS, CLUSTER_SIZES, Cell, spreads
from .measure import OURS, Row
from .table import number

MATRIX, OUTPUT, TIME, ACCENT = "#c2452d", "#2b6ca3", "#b8bfc6", "#5f6b76"
INK, FAINT = "#22282e", "#e3e6e9"


@dataclass(frozen=True, kw_only=True)
class GridPanel:
    about: str
    cells: list[Cell]
    timed: tuple[int, float]


def draw(rows: list[Row], about: dict[str, str], grid: GridPanel | None, budget: float, path: Path) -> None:
    need("matplotlib").use("agg")
    plt = need("matplotlib.pyplot")
    style = {"font.size": 9.5, "text.color": INK, "axes.labelcolor": INK, "ytick.color": INK, "xtick.color": INK, "axes.edgecolor": "#aab1b8"}
    with plt.rc_context(style):
        heights = [2.6] * (grid is not None) + [3.3] * len(about)
        figure, axes = plt.subplots(
            len(heights), 2, figsize=(10.5, 0.9 + sum(heights)), squeeze=False, width_ratios=(1.25, 1), height_ratios=heights, layout="constrained"
        )
        figure.suptitle(f"Error and time of attention at equal budgets: {budget:.3g} of the entries", fontsize=13, fontweight="bold")
        if grid:
            _spreads(axes[0][0], grid.cells)
            _cell_by_cell(axes[0][1], grid)
            _title(axes[0][0], f"{grid.about}; a dot is a cell, the bar their median")
        for (errors, times), (data, text) in zip(axes[-len(about) :], about.items(), strict=True):
            block = [row for row in rows if row.data == data]
            _errors(errors, block)
            _times(times, block)
            _title(errors, f"{data}: {text}")
        figure.legend(*axes[-1][0].get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False, fontsize=9)
        axes[-1][0].set_xlabel("relative Frobenius error to softmax, log scale")
        axes[-1][1].set_xlabel("forward time, milliseconds")
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _title(ax: Any, text: str) -> None:
    """Runs on over the panel to the right, so it must not widen its own."""
    ax.set_title(textwrap.fill(text, 125), loc="left", x=-0.46, fontsize=9.5, pad=9).set_in_layout(False)


def _spreads(ax: Any, cells: list[Cell]) -> None:
    """A dot for each cell, a line from the least to the most, and a bar at the median."""
    ax.set_xscale("log")
    lines = spreads(cells)
    for y, line in enumerate(lines):
        errors = [cell.error for cell in cells if cell.method == line.method]
        ax.plot([line.least, line.most], [y, y], color=MATRIX, alpha=0.25, linewidth=7, solid_capstyle="round", zorder=1)
        ax.scatter(errors, [y] * len(errors), s=16, color=MATRIX, linewidths=0, alpha=0.8, zorder=3)
        ax.plot([line.median] * 2, [y - 0.3, y + 0.3], color=INK, linewidth=2.2, zorder=4)
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        ax.text(line.median, y - 0.36, number(line.median), ha="center", va="bottom", fontsize=8.5, bbox=paper, zorder=5)
    ax.set_xlim(min(line.least for line in lines) / 2, max(1.0, *(line.most for line in lines)) * 2)
    _methods(ax, [line.method for line in lines])
    ax.set_ylim(len(lines) - 0.4, -0.9)


def _cell_by_cell(ax: Any, grid: GridPanel) -> None:
    """The default's error in every cell; the timed cell is framed."""
    patches = need("matplotlib.patches")
    ours = {cell.place: cell.error for cell in grid.cells if cell.method == OURS}
    table = [[ours[size, factor] for factor in BETA_FACTORS] for size in CLUSTER_SIZES]
    shades = need("matplotlib.colors").LinearSegmentedColormap.from_list("shades", ["#fdf6f3", "#e5a293"])
    ax.imshow(table, cmap=shades, norm=need("matplotlib.colors").LogNorm(), aspect="auto")
    for y, size in enumerate(CLUSTER_SIZES):
        for x, factor in enumerate(BETA_FACTORS):
            timed = (size, factor) == grid.timed
            ax.text(x, y, f"{ours[size, factor]:.3f}", ha="center", va="center", fontweight="bold" if timed else "normal")
            if timed:
                ax.add_patch(patches.Rectangle((x - 0.48, y - 0.47), 0.96, 0.94, fill=False, edgecolor=INK, linewidth=1.6))
    ax.set_xticks(range(len(BETA_FACTORS)), [f"beta x {factor:g}" for factor in BETA_FACTORS])
    ax.set_yticks(range(len(CLUSTER_SIZES)), [f"clusters of {size}" for size in CLUSTER_SIZES])
    ax.set_xlabel("the default, cell by cell; framed: the cell timed below", fontsize=8.5)
    _plain(ax)
    ax.spines["bottom"].set_visible(False)


def _methods(ax: Any, names: list[str]) -> None:
    """What the panels of errors have in common: the dashed line, the scale, the names."""
    ax.axvline(1, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=2, label="predicting zero")
    ax.xaxis.set_major_formatter(lambda e, _: f"{e:g}")
    ax.set_yticks(range(len(names)), names)
    ax.get_yticklabels()[-1].set_fontweight("bold")
    ax.grid(axis="x", color=FAINT, linewidth=0.8)
    _plain(ax)


def _errors(ax: Any, block: list[Row]) -> None:
    """A dot for each error; exact methods have no visible place on the scale and say so."""
    ax.set_xscale("log")
    shown = [row for row in block if row.matrix_error is not None]
    values = [e for row in shown for e in (row.matrix_error, row.output_error) if e is not None]
    least = min(values, default=1e-3) / 2
    for y, row in enumerate(block):
        if row.matrix_error is None:
            ax.text(
                least * 1.1,
                y,
                f"exact (output error {row.output_error:.0e}, rounding)",
                va="center",
                fontsize=8.5,
                color=ACCENT,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
            continue
        # The dot is larger than the diamond on it, so that both show where the errors agree.
        ax.plot([row.matrix_error, row.output_error], [y, y], color=FAINT, linewidth=4, zorder=1, solid_capstyle="round")
        ax.scatter(row.matrix_error, y, s=110, color=MATRIX, zorder=3, label="attention matrix" if row is shown[0] else None)
        ax.scatter(row.output_error, y, s=30, color=OUTPUT, marker="D", zorder=3, label="output" if row is shown[0] else None)
    ax.set_xlim(least, max([1.0, *values]) * 2)
    _methods(ax, [row.method for row in block])
    ax.set_ylim(len(block) - 0.4, -0.6)


def _times(ax: Any, block: list[Row]) -> None:
    times = [1e3 * row.seconds for row in block]
    colours = [ACCENT if y == len(block) - 1 else TIME for y in range(len(block))]
    ax.barh(range(len(block)), times, height=0.58, color=colours)
    for y, (row, t) in enumerate(zip(block, times, strict=True)):
        ax.text(t + max(times) * 0.015, y, f"{t:,.0f} ms   {row.entries:,.0f} entries a row", va="center", fontsize=8.5)
    ax.set_xlim(0, max(times) * 1.85)
    ax.set_ylim(len(block) - 0.4, -0.6)
    ax.set_yticks([])
    ax.xaxis.set_major_locator(need("matplotlib.ticker").MaxNLocator(5))
    ax.xaxis.set_major_formatter(lambda t, _: f"{t:,.0f}")
    _plain(ax)


def _plain(ax: Any) -> None:
    ax.set_axisbelow(True)
    ax.tick_params(length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
