"""Plates to plotly's JSON: what the page draws in a browser."""

from __future__ import annotations

import math
from typing import Any

from .plates import Cloud, Heat, Panel, Series, colour

INK, FAINT = "#22282e", "#e8ebee"


def figure(panel: Panel) -> dict[str, Any]:
    """One panel as {data, layout}."""
    layout: dict[str, Any] = {
        "title": {"text": panel.title, "font": {"size": 13}, "x": 0.02, "xanchor": "left"},
        "font": {"size": 11, "color": INK},
        "margin": {"l": 58, "r": 14, "t": 40, "b": 46},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "hovermode": "closest",
        "legend": {"font": {"size": 10}, "bgcolor": "rgba(255,255,255,0.7)"},
    }
    if panel.cloud:
        return {"data": [_cloud(panel.cloud), *_rings()], "layout": layout | {"scene": _scene(), "showlegend": False}}
    layout["xaxis"], layout["yaxis"] = _axis(panel.x, panel.log_x, panel.x_range), _axis(panel.y, panel.log_y, panel.y_range)
    if panel.heat:
        layout["yaxis"]["autorange"] = "reversed"
        if panel.heat.x:  # numbers as names, evenly spaced
            layout["xaxis"]["type"] = layout["yaxis"]["type"] = "category"
        return {"data": [_heat(panel.heat)], "layout": layout}
    sizes = sorted({x for s in panel.series for x in s.x}) if panel.log_x else []
    if 0 < len(sizes) <= 8:
        layout["xaxis"] |= {"tickvals": sizes, "ticktext": [f"{x:g}" for x in sizes]}
    layout["showlegend"] = any(s.name for s in panel.series)
    return {"data": [_series(s, colour(i, s.colour)) for i, s in enumerate(panel.series)], "layout": layout}


def _axis(title: str, log: bool, limits: tuple[float, float] | None) -> dict[str, Any]:
    axis: dict[str, Any] = {
        "title": {"text": title, "font": {"size": 11}},
        "gridcolor": FAINT,
        "zeroline": False,
        "linecolor": "#aab1b8",
        "automargin": True,
    }
    if log:
        axis |= {"type": "log", "exponentformat": "power"}
    if limits:
        axis["range"] = [math.log10(v) for v in limits] if log else list(limits)
    return axis


def _series(one: Series, shade: str) -> dict[str, Any]:
    pairs = [(x, y) for x, y in zip(one.x, one.y, strict=True) if y is not None]
    base: dict[str, Any] = {"name": one.name, "x": [p[0] for p in pairs], "y": [p[1] for p in pairs], "opacity": 0.4 if one.faint else 0.9}
    if one.labels:
        base |= {"text": list(one.labels), "textposition": "top center", "textfont": {"size": 9}}
    if one.kind == "bars":
        return base | {"type": "bar", "marker": {"color": shade}}
    if one.kind == "dots":
        mode = "markers+text" if one.labels and len(one.labels) <= 16 else "markers"
        return base | {"type": "scatter", "mode": mode, "marker": {"color": shade, "size": 7}}
    line = {"color": shade, "width": 1.2 if one.kind == "rule" else 1.8, "dash": "dash" if one.kind == "rule" else "solid"}
    mode = "lines+markers" if one.kind == "both" else "lines"
    return base | {"type": "scatter", "mode": mode, "line": line, "marker": {"color": shade, "size": 5}}


def _heat(heat: Heat) -> dict[str, Any]:
    z, low, high = heat.z, heat.low, heat.high
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": heat.x,
        "y": heat.y,
        "colorscale": "RdBu" if heat.signed else "Viridis",
        "colorbar": {"thickness": 9},
    }
    if heat.signed:
        trace["reversescale"] = True  # plotly's scale of that name runs the other way
    if heat.log:
        least = low or 1e-6
        trace["hovertemplate"] = "%{x}, %{y}: 10^%{z}<extra></extra>"
        z = [[None if v is None else round(math.log10(max(v, least)), 2) for v in row] for row in z]
        low, high = math.log10(least), math.log10(high) if high else None
        trace["colorbar"] |= {"tickprefix": "10^"}
    if heat.numbers:
        trace |= {"texttemplate": "%{z:.3~g}", "textfont": {"size": 10}}
    if heat.x:
        trace["x"], trace["y"] = [str(v) for v in heat.x], [str(v) for v in heat.y or []]
    return trace | {"z": z, "zmin": low, "zmax": high}


def _cloud(cloud: Cloud) -> dict[str, Any]:
    x, y, z = (list(c) for c in zip(*cloud.points, strict=True))
    marker = {"size": 3, "color": [colour(g, None) for g in cloud.group]}
    return {
        "type": "scatter3d",
        "mode": "markers",
        "x": x,
        "y": y,
        "z": z,
        "marker": marker,
        "text": [f"cluster {g}" for g in cloud.group],
        "hoverinfo": "text",
    }


def _rings() -> list[dict[str, Any]]:
    turn = [2 * math.pi * i / 48 for i in range(49)]
    up, down, flat = [round(math.cos(a), 3) for a in turn], [round(math.sin(a), 3) for a in turn], [0] * 49
    line = {"color": "#c5ccd3", "width": 2}
    return [
        {"type": "scatter3d", "mode": "lines", "x": x, "y": y, "z": z, "line": line, "hoverinfo": "skip"}
        for x, y, z in ((up, down, flat), (up, flat, down), (flat, up, down))
    ]


def _scene() -> dict[str, Any]:
    hidden = {"visible": False}
    return {"xaxis": hidden, "yaxis": hidden, "zaxis": hidden, "aspectmode": "cube"}
