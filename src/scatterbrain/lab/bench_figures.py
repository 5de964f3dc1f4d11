"""The benchmark's figures, from a saved record: time and memory against length, and error against time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .extras import need
from .record import BOTH, FORWARD, Record, Row

INK, FAINT, ACCENT = "#22282e", "#e3e6e9", "#c2452d"
OURS = {"default": ACCENT, "smyrf+performer": "#1f5f99", "reformer+performer": "#4a8fc7", "window+performer": "#7fb3dc"}
OURS |= {"crosspolytope+performer": "#14406b", "performer": "#8c6bb1", "means": "#d9705c", "support": "#e3a092"}
OTHERS = {"sdpa": INK, "naive": "#8a929a"}
OTHERS |= {"performer-pytorch": "#5e4b8b", "reformer-pytorch": "#2f7f6f", "nystrom-attention": "#b8860b", "bigbird": "#6b8e23"}
OTHERS |= {"linear-attention-transformer": "#a0527a", "routing-transformer": "#3c9d9b", "longformer": "#94684a"}
LINES = ("default", "smyrf+performer", "reformer+performer", "window+performer", "crosspolytope+performer", *OTHERS)
LABELS = {"sdpa": "softmax, fused (SDPA)", "naive": "softmax, naive"}
PASSES = {FORWARD: "forward", BOTH: "forward + backward"}
LENGTHS_OF, FRONT_OF, FRONT_AT = "normal", ("smollm2", "whisper", "minilm", "process1", "normal"), 2048
STYLE = {"font.size": 9.5, "text.color": INK, "axes.labelcolor": INK, "ytick.color": INK, "xtick.color": INK, "axes.edgecolor": "#aab1b8"}


def draw(record: Record, folder: Path) -> dict[str, Path]:
    """Those there is something to draw in."""
    need("matplotlib", "bench").use("agg")
    plt = need("matplotlib.pyplot", "bench")
    paths = {}
    with plt.rc_context(STYLE):
        for name, make in {"time": time_figure, "memory": memory_figure, "front": front_figure}.items():
            figure = make(record)
            if figure is not None:
                paths[name] = folder / f"{name}.png"
                figure.savefig(paths[name], dpi=160)
                plt.close(figure)
    return paths


def time_figure(record: Record) -> Any:
    return length_figure(record, "Time of attention against length", "milliseconds", lambda row, what: scaled(row.seconds(what), 1e3))


def memory_figure(record: Record) -> Any:
    return length_figure(
        record, "Peak memory of attention against length, beyond its inputs", "MiB", lambda row, what: scaled(row.peak(what), 2**-20)
    )


def scaled(value: float | None, factor: float) -> float | None:
    return value * factor if value else None


def length_figure(record: Record, title: str, unit: str, value: Callable[[Row, str], float | None]) -> Any:
    """A panel for each pass, a line for each method, its name at its end."""
    rows = [row for row in record.rows.values() if row.data == LENGTHS_OF and row.method in LINES]
    shown = [what for what in PASSES if any(value(row, what) for row in rows)]
    if not shown:
        return None
    plt = need("matplotlib.pyplot", "bench")
    figure, axes = plt.subplots(1, len(shown), figsize=(7.2 * len(shown), 5.6), squeeze=False, layout="constrained")
    config = record.header["config"]
    causal = "causal, " if config["causal"] else ""
    shape = f"B=1, H={config['heads']}, d={config['width']}, {causal}{config['dtype']}, {record.header['hardware']['threads']} threads"
    figure.suptitle(f"{title}\n{shape}, {record.header['hardware']['processor']}", fontsize=11)
    for ax, what in zip(axes[0], shown, strict=True):
        lines: dict[str, tuple[str, list[tuple[int, float]]]] = {}
        for row in sorted(rows, key=lambda row: row.length):
            y = value(row, what)
            if y:
                lines.setdefault(row.method, (row.label, []))[1].append((row.length, y))
        ends = [plot_line(ax, method, label, points) for method, (label, points) in lines.items()]
        log_axes(ax, sorted({row.length for row in rows}))
        ax.set_title(PASSES[what], loc="left", fontsize=10)
        ax.set_xlabel("tokens")
        ax.set_ylabel(unit)
        name_ends(figure, ax, ends)
    return figure


def plot_line(ax: Any, method: str, label: str, points: list[tuple[int, float]]) -> tuple[str, str, float, float]:
    x, y = zip(*points, strict=True)
    colour = colour_of(method)
    exact, mine = method in ("sdpa", "naive"), method in OURS
    style = "--" if method == "naive" else "-" if exact or mine else (0, (4, 1.5))
    ax.plot(
        x,
        y,
        linestyle=style,
        color=colour,
        linewidth=2.6 if method in ("default", "sdpa") else 1.4,
        marker="o",
        markersize=3.4,
        zorder=4 if mine else 3,
    )
    return label, colour, x[-1], y[-1]


def colour_of(method: str) -> str:
    return {**OURS, **OTHERS}.get(method, "#9aa3ab")


def log_axes(ax: Any, lengths: list[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
    plain(ax)


def plain(ax: Any) -> None:
    ax.grid(color=FAINT, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(length=0)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def name_ends(figure: Any, ax: Any, ends: list[tuple[str, str, float, float]]) -> None:
    """Names in the right margin, near the lines' ends, pushed apart; a thin line leads from each end to its name."""
    low, high = ax.get_ylim()
    height = ax.get_position().height * figure.get_figheight() * 72
    ends = sorted(ends, key=lambda end: end[3])
    fraction = [ax.transAxes.inverted().transform(ax.transData.transform((x, y))) for _, _, x, y in ends]
    places = pushed_apart([float(y) for _, y in fraction], 13 / height)
    for (label, colour, x, y), place in zip(ends, places, strict=True):
        ax.annotate(
            label,
            xy=(x, y),
            xytext=(1.04, place),
            textcoords="axes fraction",
            va="center",
            fontsize=8.5,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.5, "shrinkA": 2, "shrinkB": 2, "relpos": (0, 0.5)},
        )
    ax.set_ylim(low, high)


def pushed_apart(wanted: list[float], gap: float) -> list[float]:
    """Ascending places in [0, 1] at least `gap` apart, near the ascending wanted ones: groups that touch share their mean."""
    groups: list[list[float]] = []
    top = 1 - gap * (len(wanted) - 1)
    for i, at in enumerate(wanted):
        at = min(max(at, gap * i), top + gap * i)
        groups.append([at])
        while len(groups) > 1 and centre(groups[-1]) - centre(groups[-2]) < gap * (len(groups[-1]) + len(groups[-2])) / 2:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [centre(group) + gap * (i - (len(group) - 1) / 2) for group in groups for i in range(len(group))]


def centre(group: list[float]) -> float:
    return sum(group) / len(group)


def front_figure(record: Record) -> Any:
    """Error against time on real attention: nothing is better on both counts than the front, exact attention included."""
    place = front_place(record)
    if place is None:
        return None
    data, length = place
    rows = [row for row in record.rows.values() if (row.data, row.length) == place and row.seconds()]
    plt = need("matplotlib.pyplot", "bench")
    figure, axes = plt.subplots(1, 2, figsize=(15, 5.8), layout="constrained")
    figure.suptitle(f"Error against time, {length:,} tokens\n{data}: {record.about.get(data, '')}", fontsize=11)
    for ax, kind in zip(axes, ("matrix", "output"), strict=True):
        front_panel(figure, ax, rows, kind)
    return figure


def milliseconds(row: Row) -> float:
    return 1e3 * (row.seconds() or 0.0)


def front_panel(figure: Any, ax: Any, rows: list[Row], kind: str) -> None:
    points = [(row, milliseconds(row), getattr(row, f"{kind}_error")) for row in rows if row.kind != "exact" and getattr(row, f"{kind}_error")]
    exact = {row.method: milliseconds(row) for row in rows if row.kind == "exact"}
    limit = min(exact.values(), default=float("inf"))
    ax.set_xscale("log")
    ax.set_yscale("log")
    for row, x, y in points:
        ax.scatter(x, y, s=80 if row.method == "default" else 36, color=colour_of(row.method), marker="o" if row.kind == "ours" else "s", zorder=4)
    for method, x in exact.items():
        ax.axvline(x, color=colour_of(method), linewidth=1, linestyle="-" if method == "sdpa" else "--", zorder=2)
        name = {"color": colour_of(method), "fontsize": 8.5, "rotation": 90, "ha": "right", "va": "bottom"}
        ax.text(x * 0.985, 0.02, LABELS[method], transform=ax.get_xaxis_transform(), **name)
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    left, right, low, high = left * 0.8, right * 1.25, low / 1.4, high * 1.3
    best = front([(x, y) for _, x, y in points if x < limit])
    if best:
        # What is slower than exact attention is on no front, so this ends there.
        edge = [(limit, best[-1][1]), (limit, low)] if exact else []
        ax.plot(*zip(*best, *edge, strict=True), color=ACCENT, linewidth=6, alpha=0.2, zorder=1, solid_capstyle="round", drawstyle="steps-post")
    if exact:
        ax.axvspan(limit, right, color="#f3f4f6", zorder=0)
        ax.text(0.99, 1.01, "shaded: slower than exact attention", transform=ax.transAxes, ha="right", va="bottom", fontsize=8.5, color="#8a929a")
    ax.set_xlim(left, right)
    ax.set_ylim(low, high)
    ax.set_xlabel("forward time, milliseconds")
    ax.set_ylabel(f"relative Frobenius error of the {kind}")
    ticker = need("matplotlib.ticker")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda v, _: f"{v:,g}")
        axis.set_minor_formatter(ticker.NullFormatter())
    plain(ax)
    name_ends(figure, ax, [(row.label, colour_of(row.method), x, y) for row, x, y in points])


def front_place(record: Record) -> tuple[str, int] | None:
    """Real attention at 2,048 tokens, or what is nearest to it."""
    found = {(row.data, row.length) for row in record.rows.values() if row.seconds() and row.output_error and row.kind != "exact"}
    return min(found, key=lambda place: (FRONT_OF.index(place[0]), abs(place[1] - FRONT_AT)), default=None)


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those no other is at once as fast and as exact as."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best
