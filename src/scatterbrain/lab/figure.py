"""The demo's figure: errors and time of each method, a row of panels a data set."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from .extras import need
from .measure import Row

MATRIX, OUTPUT, TIME, OURS = "#c2452d", "#2b6ca3", "#b8bfc6", "#5f6b76"
INK, FAINT = "#22282e", "#e3e6e9"


def draw(rows: list[Row], about: dict[str, str], budget: float, path: Path) -> None:
    need("matplotlib").use("agg")
    plt = need("matplotlib.pyplot")
    style = {"font.size": 9.5, "text.color": INK, "axes.labelcolor": INK, "ytick.color": INK, "xtick.color": INK, "axes.edgecolor": "#aab1b8"}
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            len(about), 2, figsize=(10.5, 0.9 + 3.3 * len(about)), squeeze=False, width_ratios=(1.25, 1), sharey="row", layout="constrained"
        )
        figure.suptitle(f"Error and time of attention at equal budgets: {budget:.3g} of the entries", fontsize=13, fontweight="bold")
        for (errors, times), (data, text) in zip(axes, about.items(), strict=True):
            block = [row for row in rows if row.data == data]
            _errors(errors, block)
            _times(times, block)
            # Runs on over the panel to the right, so it must not widen its own.
            title = errors.set_title(textwrap.fill(f"{data}: {text}", 125), loc="left", x=-0.46, fontsize=9.5, pad=9)
            title.set_in_layout(False)
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False, fontsize=9)
        axes[-1][0].set_xlabel("relative Frobenius error to softmax, log scale")
        axes[-1][1].set_xlabel("forward time, milliseconds")
        figure.savefig(path, dpi=160)
        plt.close(figure)


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
                color=OURS,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
            continue
        # The dot is larger than the diamond on it, so that both show where the errors agree.
        ax.plot([row.matrix_error, row.output_error], [y, y], color=FAINT, linewidth=4, zorder=1, solid_capstyle="round")
        ax.scatter(row.matrix_error, y, s=110, color=MATRIX, zorder=3, label="attention matrix" if row is shown[0] else None)
        ax.scatter(row.output_error, y, s=30, color=OUTPUT, marker="D", zorder=3, label="output" if row is shown[0] else None)
    ax.axvline(1, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=2, label="predicting zero")
    ax.xaxis.set_major_formatter(lambda e, _: f"{e:g}")
    ax.set_xlim(least, max([1.0, *values]) * 2)
    ax.set_yticks(range(len(block)), [row.method for row in block])
    ax.get_yticklabels()[-1].set_fontweight("bold")
    ax.invert_yaxis()
    ax.grid(axis="x", color=FAINT, linewidth=0.8)
    _plain(ax)


def _times(ax: Any, block: list[Row]) -> None:
    times = [1e3 * row.seconds for row in block]
    colours = [OURS if y == len(block) - 1 else TIME for y in range(len(block))]
    ax.barh(range(len(block)), times, height=0.58, color=colours)
    for y, (row, t) in enumerate(zip(block, times, strict=True)):
        ax.text(t + max(times) * 0.015, y, f"{t:,.0f} ms   {row.entries:,.0f} entries a row", va="center", fontsize=8.5)
    ax.set_xlim(0, max(times) * 1.75)
    ax.xaxis.set_major_locator(need("matplotlib.ticker").MaxNLocator(5))
    ax.xaxis.set_major_formatter(lambda t, _: f"{t:,.0f}")
    _plain(ax)


def _plain(ax: Any) -> None:
    ax.set_axisbelow(True)
    ax.tick_params(length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
