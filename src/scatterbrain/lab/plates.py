"""A figure as data: what matplotlib draws to a file and the page draws in a browser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

COLOURS = ("#c2452d", "#2b6ca3", "#3f8f5b", "#8a5fb0", "#c98a1b", "#5f6b76", "#2aa3a3", "#b0487f", "#7a7a2a", "#36454f", "#d97b66", "#7fa8cc")
SPARSE, LOW_RANK, BOTH, OTHER = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[5]
Kind = Literal["line", "dots", "both", "bars", "rule"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """rule is a thin dashed line: a bound or a formula. labels say what a dot is."""

    name: str
    x: list[Any]
    y: list[Any]
    kind: Kind = "both"
    colour: str | None = None
    labels: tuple[str, ...] = ()
    faint: bool = False


@dataclass(frozen=True, kw_only=True)
class Heat:
    """z[row][column], drawn from the top; on a log scale what is below `low` takes its colour."""

    z: Sequence[Sequence[float | None]]
    x: list[Any] | None = None
    y: list[Any] | None = None
    low: float | None = None
    high: float | None = None
    log: bool = False
    signed: bool = False
    numbers: bool = False


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """Points in space, coloured by group."""

    points: list[list[float]]
    group: list[int]


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    x: str = ""
    y: str = ""
    series: tuple[Series, ...] = ()
    heat: Heat | None = None
    cloud: Cloud | None = None
    log_x: bool = False
    log_y: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Plate:
    title: str
    caption: str
    panels: tuple[Panel, ...]
    columns: int = 2
    shrink: float = 1.0  # of a panel's side, where there are many


def colour(index: int, given: str | None) -> str:
    return given or COLOURS[index % len(COLOURS)]
