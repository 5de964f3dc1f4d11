"""Plates to PNG and SVG."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from .extras import need
from .plates import Heat, Panel, Plate, Series, colour

INK, FAINT = "#22282e", "#e3e6e9"
WIDTH, HEIGHT = 5.2, 3.9
PIXELS = 140


def draw(plate: Plate, stem: Path) -> dict[str, Path]:
    need("matplotlib", "analysis").use("agg")
    plt = need("matplotlib.pyplot", "analysis")
    columns = min(plate.columns, len(plate.panels))
    rows = -(-len(plate.panels) // columns)
    style = {"font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": "#aab1b8", "svg.fonttype": "none", "svg.hashsalt": "plate"}
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = {kind: stem.with_suffix(f".{kind}") for kind in ("png", "svg")}
    with plt.rc_context(style):
        figure = plt.figure(figsize=(WIDTH * columns * plate.shrink, 0.9 + HEIGHT * rows * plate.shrink), layout="constrained")
        figure.suptitle(f"{plate.title}\n", fontsize=12, fontweight="bold")
        figure.supxlabel(textwrap.fill(plate.caption, round(62 * columns * plate.shrink)), fontsize=8.5, color="#4a535c")
        for i, panel in enumerate(plate.panels):
            ax = figure.add_subplot(rows, columns, i + 1, projection="3d" if panel.cloud else None)
            _panel(figure, ax, panel)
        figure.savefig(paths["png"], dpi=PIXELS)
        figure.savefig(paths["svg"], metadata={"Date": None})
        plt.close(figure)
    return paths


def _panel(figure: Any, ax: Any, panel: Panel) -> None:
    ax.set_title(panel.title, fontsize=9.5, loc="left")
    if panel.cloud:
        _cloud(ax, panel)
        return
    ax.set_xlabel(panel.x)
    ax.set_ylabel(panel.y)
    if panel.heat:
        _heat(figure, ax, panel.heat)
        return
    bars = [s for s in panel.series if s.kind == "bars"]
    for i, one in enumerate(panel.series):
        _series(ax, one, colour(i, one.colour), len(bars), bars.index(one) if one in bars else 0)
    if panel.log_x:
        ax.set_xscale("log", base=2 if _powers_of_two(panel) else 10)
    if panel.log_y:
        ax.set_yscale("log")
    if panel.x_range:
        ax.set_xlim(*panel.x_range)
    if panel.y_range:
        ax.set_ylim(*panel.y_range)
    ax.grid(color=FAINT, linewidth=0.7)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if any(s.name for s in panel.series):
        ax.legend(fontsize=7.5, frameon=False, ncols=1 + (len(panel.series) > 7))


def _powers_of_two(panel: Panel) -> bool:
    return all(float(math.log2(x)).is_integer() for s in panel.series for x in s.x if x and x > 0)


def _series(ax: Any, one: Series, shade: str, bars: int, place: int) -> None:
    alpha = 0.35 if one.faint else 0.9
    label = one.name or None
    dots = [(x, y) for x, y in zip(one.x, one.y, strict=True) if y is not None]
    x, y = [d[0] for d in dots], [d[1] for d in dots]
    if one.kind == "bars":
        width = 0.8 / max(1, bars)
        spots = [i - 0.4 + width * (place + 0.5) for i in range(len(x))]
        ax.bar(spots, y, width * 0.94, color=shade, label=label, alpha=alpha)
        ax.set_xticks(range(len(x)), [str(v) for v in x], rotation=30 if len(x) > 4 else 0, ha="right" if len(x) > 4 else "center", fontsize=8)
    elif one.kind == "dots":
        ax.scatter(x, y, s=14, color=shade, label=label, alpha=alpha, linewidths=0)
        for spot, text in zip(dots, one.labels if len(one.labels) <= 16 else (), strict=False):
            ax.annotate(text, spot, fontsize=7, xytext=(4, 2), textcoords="offset points")
    elif one.kind == "rule":
        ax.plot(x, y, color=shade, linewidth=1.1, linestyle=(0, (4, 3)), label=label)
    else:
        ax.plot(x, y, color=shade, linewidth=1.5, label=label, alpha=alpha, marker="o" if one.kind == "both" else None, markersize=3.5)


def _heat(figure: Any, ax: Any, heat: Heat) -> None:
    colours = need("matplotlib.colors", "analysis")
    z = [[math.nan if v is None else v for v in row] for row in heat.z]
    low, high = heat.low, heat.high
    if heat.log:
        low = low or 1e-6
        z = [[max(v, low) for v in row] for row in z]
        norm = colours.LogNorm(low, high)
    else:
        norm = colours.Normalize(low, high)
    shades = "RdBu_r" if heat.signed else "viridis"
    image = ax.imshow(z, norm=norm, cmap=shades, aspect="auto", interpolation="nearest")
    for ticks, names in ((ax.set_xticks, heat.x), (ax.set_yticks, heat.y)):
        if names:
            every = max(1, len(names) // 12)
            ticks(range(0, len(names), every), [str(n) for n in names[::every]], fontsize=8)
    if heat.numbers:
        for i, row in enumerate(z):
            for j, v in enumerate(row):
                ax.text(
                    j,
                    i,
                    f"{v:.0f}" if v >= 10 else f"{v:.2g}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if norm(v) < 0.6 and not heat.signed else INK,
                )
    figure.colorbar(image, ax=ax, shrink=0.85)


def _cloud(ax: Any, panel: Panel) -> None:
    assert panel.cloud
    x, y, z = zip(*panel.cloud.points, strict=True)
    ax.scatter(x, y, z, c=[colour(g, None) for g in panel.cloud.group], s=9, depthshade=True, linewidths=0)
    ring = [2 * math.pi * i / 72 for i in range(73)]
    flat, up, down = [0.0] * 73, [math.cos(a) for a in ring], [math.sin(a) for a in ring]
    for circle in ((up, down, flat), (up, flat, down), (flat, up, down)):
        ax.plot(*circle, color="#c5ccd3", linewidth=0.7)
    ax.set_box_aspect((1, 1, 1))
    ax.set_axis_off()
