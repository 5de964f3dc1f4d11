"""Theorem 1 by simulation: which kind of approximation reaches a small error at n^(1+o(1)) parameters, as beta grows."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .. import analysis
from ..errors import require, require_int
from .analyze_process1 import unit
from .plates import BOTH, LOW_RANK, SPARSE, Panel, Plate, Series
from .study import Cell, Study, option, table

FACTORS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
KINDS = ("low_rank", "sparse", "both")
NAMES = {"low_rank": "low-rank", "sparse": "sparse", "both": "sparse + low-rank"}
SHADES = {"low_rank": LOW_RANK, "sparse": SPARSE, "both": BOTH}


@dataclass(frozen=True, kw_only=True)
class TemperatureConfig:
    lengths: tuple[int, ...] = option((256, 512, 1024, 2048), "tokens; the recorded run goes to 4096")
    cluster_size: int = option(4, "tokens in a cluster")
    delta_factor: float = option(0.5, "delta is this over log(n)^(1/4)")
    width_factor: float = option(16.0, "head width is this times log(n)^1.5")
    entries_factor: float = option(1.0, "stored entries a row are this times log(n)^2")
    seed: int = option(0, "of the draws")
    out: str = option("records", "folder for the record and the figures")

    def __post_init__(self) -> None:
        for n in self.lengths:
            require_int(n, "lengths", least=32)
        require(len(self.lengths) >= 2, "lengths", "name at least two, to fit an exponent", self.lengths, "pass 256 512 1024")
        require(self.entries_factor >= 0.5, "entries_factor", "be at least 0.5", self.entries_factor, "pass 1")
        require(0 < self.delta_factor <= 1, "delta_factor", "lie in (0, 1]", self.delta_factor, "pass 0.5")


def cells(config: TemperatureConfig) -> Iterator[Cell]:
    for n in config.lengths:
        for factor in FACTORS:
            yield f"{n} tokens, beta {factor:g} log n", functools.partial(measure, config, n, factor)


def measure(config: TemperatureConfig, n: int, factor: float) -> dict[str, Any]:
    """beta in units of log n. log(n)^2 entries a row are n^(1+o(1)) in all."""
    delta = config.delta_factor / math.log(n) ** 0.25
    d = math.ceil(config.width_factor * math.log(n) ** 1.5)
    z, _label = unit(n, d, config.cluster_size, delta, config.seed)
    beta, entries = factor * math.log(n), math.ceil(config.entries_factor * math.log(n) ** 2)
    # Everything is relative to exp(beta (1 - delta^2)), so that nothing overflows.
    matrix = torch.exp(beta * (z @ z.mT - (1 - delta**2)))
    found = analysis.kind_errors(matrix, entries)
    return {"n": n, "d": d, "delta": delta, "factor": factor, "beta": beta, "entries": entries, "unit": beta * (1 - delta**2), **asdict(found)}


def summarize(config: dict[str, Any], cells: dict[str, Any]) -> dict[str, Any]:
    """Exponents of the absolute errors in n; `peak` is that of exp(beta (1 - delta^2)), the yardstick at low temperature."""
    out = {}
    for factor in FACTORS:
        some = sorted((c for c in cells.values() if c["factor"] == factor), key=lambda c: c["n"])
        last, sizes = some[-1], [c["n"] for c in some]
        fits = {k: asdict(analysis.exponent(sizes, [max(c[k], 1e-300) * math.exp(c["unit"]) for c in some])) for k in KINDS}
        out[f"{factor:g}"] = {
            "regime": regime(last),
            "n": last["n"],
            "exponents": {k: {"power": f["power"], "error": f["error"]} for k, f in fits.items()},
            "peak": analysis.exponent(sizes, [math.exp(c["unit"]) for c in some]).power,
            "over_n": {k: last[k] * math.exp(last["unit"]) / last["n"] for k in KINDS},
            "over_peak": {k: last[k] for k in KINDS},
            "relative": {k: last[k] / last["norm"] for k in KINDS},
        }
    return out


def regime(cell: dict[str, Any]) -> str:
    """high: below log n / log d; mid: from (1 - delta^2) log n; low: from where the theorem's sparse bound begins to bite."""
    if cell["factor"] < 1 / math.log(cell["d"]):
        return "high"
    return "between" if cell["factor"] < 1 - cell["delta"] ** 2 else "mid" if cell["factor"] <= 1.5 else "low"


def text(record: dict[str, Any]) -> list[str]:
    found = record["summary"]
    longest = max(record["config"]["lengths"])
    rows = [
        (f"beta = {f} log n", r["regime"], *(r["exponents"][k]["power"] for k in KINDS), r["peak"], *(r["over_n"][k] for k in KINDS))
        for f, r in found.items()
    ]
    headings = ("", "regime", "low-rank", "sparse", "both", "peak", "low-rank / n", "sparse / n", "both / n")
    times = f"{record['config']['entries_factor']:g} log(n)^2"
    said = f"Frobenius error at {times} entries a row: exponents in n (peak: that of exp(beta (1 - delta^2))), and error / n at n = {longest:,}"
    relative = [(f"beta = {f} log n", *(r["relative"][k] for k in KINDS), *(r["over_peak"][k] for k in KINDS)) for f, r in found.items()]
    more = f"At n = {longest:,}: relative error, and error over exp(beta (1 - delta^2))"
    names = ("low-rank", "sparse", "both")
    return [said, *table(headings, rows), "", more, *table(("", *names, *(f"{n} / peak" for n in names)), relative)]


def plate(record: dict[str, Any]) -> Plate:
    some = list(record["cells"].values())
    lengths = record["config"]["lengths"]
    panels = []
    for n in (lengths[0], lengths[-1]):
        part = sorted((c for c in some if c["n"] == n), key=lambda c: c["factor"])
        curves = tuple(Series(name=NAMES[k], x=[c["factor"] for c in part], y=[c[k] / c["norm"] for c in part], colour=SHADES[k]) for k in KINDS)
        panels.append(Panel(title=f"n = {n:,}: relative error", x="beta / log n", y="relative Frobenius error", series=curves, log_y=True))
    for factor, name, yard in ((0.1, "high temperature", "n"), (1.0, "mid temperature", "n"), (4.0, "low temperature", "exp(beta (1 - delta^2))")):
        part = sorted((c for c in some if c["factor"] == factor), key=lambda c: c["n"])
        sizes = [c["n"] for c in part]
        over = [[c[k] * (math.exp(c["unit"]) / c["n"] if yard == "n" else 1) for c in part] for k in KINDS]
        curves = tuple(Series(name=NAMES[k], x=sizes, y=y, colour=SHADES[k]) for k, y in zip(KINDS, over, strict=True))
        panels.append(Panel(title=f"{name}: beta = {factor:g} log n", x="n", y=f"error / {yard}", series=curves, log_x=True, log_y=True))
    powers = tuple(
        Series(
            name=NAMES[k], x=list(map(float, record["summary"])), y=[r["exponents"][k]["power"] for r in record["summary"].values()], colour=SHADES[k]
        )
        for k in KINDS
    )
    peak = Series(
        name="exp(beta (1 - delta^2))", x=list(map(float, record["summary"])), y=[r["peak"] for r in record["summary"].values()], kind="rule"
    )
    panels.append(Panel(title="fitted exponents", x="beta / log n", y="error ~ n^", series=(*powers, peak)))
    caption = (
        "Process 1 on the unit sphere, matrix exp(beta Z Z'), about log(n)^2 stored entries a row. "
        "Theorem 1: at high temperature low-rank stays below eps n and sparse grows as n; in the middle only both together stay below "
        "eps n; at low temperature sparse stays below eps exp(beta (1 - delta^2))."
    )
    return Plate(title="Theorem 1: softmax temperature and what approximates", caption=caption, panels=tuple(panels), columns=3)


STUDY = Study(
    name="temperature",
    title="Theorem 1",
    about="error of low-rank, sparse and both against the inverse temperature, with fitted exponents in n",
    config=TemperatureConfig,
    cells=cells,
    summarize=summarize,
    text=text,
    plate=plate,
)
