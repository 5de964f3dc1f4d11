"""Theorem 2: bias and variance of one entry's estimate, p of cross-polytope hashing, and the per-entry error figure."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import analysis
from ..analysis.estimators import any_round
from ..errors import require, require_int
from .plates import BOTH, LOW_RANK, SPARSE, Panel, Plate, Series
from .study import Cell, Study, option, table

DOTS = (*tuple(round(-1 + 0.1 * i, 1) for i in range(20)), 0.95, 0.99)
SHADES = {"reformer": SPARSE, "performer": LOW_RANK, "scatterbrain": BOTH}


@dataclass(frozen=True, kw_only=True)
class VarianceConfig:
    width: int = option(64, "of q and k")
    features: int = option(64, "of the Performer")
    draws: int = option(20_000, "of features and hashes")
    rounds: tuple[int, ...] = option((1, 8), "hash rounds of the per-entry figure")
    widths: tuple[int, ...] = option((16, 32, 64, 128, 256), "for p against its asymptotic formula")
    rotations: int = option(400, "drawn for p at each width; one serves width / 2 pairs")
    seed: int = option(0, "of the draws")
    out: str = option("records", "folder for the record and the figures")

    def __post_init__(self) -> None:
        for name in ("width", "features", "rotations"):
            require_int(getattr(self, name), name, least=2)
        require_int(self.draws, "draws", least=100)
        require(len(self.widths) >= 2, "widths", "name at least two", self.widths, "pass 16 64 256")


def cells(config: VarianceConfig) -> Iterator[Cell]:
    yield "Performer", functools.partial(performer, config, False)
    if config.features % config.width == 0:
        yield "Performer, orthogonal", functools.partial(performer, config, True)
    yield "Scatterbrain", functools.partial(scatterbrain, config)
    for width in config.widths:
        yield f"hash, width {width}", functools.partial(hits, config, width)


def performer(config: VarianceConfig, orthogonal: bool) -> dict[str, Any]:
    found = analysis.performer_moments(DOTS, config.width, config.features, config.draws, orthogonal=orthogonal, seed=config.seed)
    return {"mean": found.mean.tolist(), "mean_error": found.mean_error.tolist(), "variance": found.variance.tolist()}


def scatterbrain(config: VarianceConfig) -> dict[str, Any]:
    found = analysis.scatterbrain_moments(DOTS, config.width, config.features, config.draws, seed=config.seed)
    return {"mean": found.mean.tolist(), "mean_error": found.mean_error.tolist(), "variance": found.variance.tolist()}


def hits(config: VarianceConfig, width: int) -> dict[str, Any]:
    rotations = max(config.rotations, config.rotations * 64 // width)
    return {"width": width, "hit": analysis.measured_hits(DOTS, width, rotations, config.seed).tolist(), "pairs": rotations * (width // 2)}


def dots() -> Tensor:
    return torch.tensor(DOTS, dtype=torch.float64)


def summarize(config: dict[str, Any], cells: dict[str, Any]) -> dict[str, Any]:
    exact, closed = dots().exp(), analysis.performer_variance(dots(), config["features"])
    out: dict[str, Any] = {"dots": list(DOTS), "closed_performer": closed.tolist()}
    for name in ("Performer", "Performer, orthogonal", "Scatterbrain"):
        if name in cells:
            off = (torch.tensor(cells[name]["mean"], dtype=torch.float64) - exact).abs() / torch.tensor(cells[name]["mean_error"]).clamp(min=1e-12)
            out[f"bias in standard errors, {name}"] = float(off[1:].max())
    ratio = torch.tensor(cells["Scatterbrain"]["variance"]) / torch.tensor(cells["Performer"]["variance"])
    hit = _hit(cells, config["width"], config["widths"])
    out["variance_ratio"] = ratio.tolist()
    out["one_minus_p"] = (1 - hit).tolist()
    out["worst_ratio_gap"] = float((ratio - (1 - hit)).abs()[1:11].max())
    tame = slice(1, 13)  # up to q.k = 0.2; beyond, the estimate of a variance itself has an enormous one
    out["variance_over_closed"] = (torch.tensor(cells["Performer"]["variance"], dtype=torch.float64) / closed).tolist()
    out["worst_variance_gap"] = float((torch.tensor(out["variance_over_closed"][tame]) - 1).abs().max())
    out["slopes"] = _slopes(cells, config["widths"])
    for rounds in config["rounds"]:
        errors = analysis.entry_errors(dots(), any_round(hit, rounds), config["features"])
        out[f"errors, {rounds} rounds"] = {name: e.tolist() for name, e in errors.items()}
    return out


def _hit(cells: dict[str, Any], width: int, widths: list[int]) -> Tensor:
    near = min(widths, key=lambda w: abs(math.log(w / width)))
    return torch.tensor(cells[f"hash, width {near}"]["hit"], dtype=torch.float64)


def _slopes(cells: dict[str, Any], widths: list[int]) -> list[dict[str, float]]:
    """-ln p against ln d: measured by a fit over widths, beside tau^2 / (4 - tau^2)."""
    out = []
    for i, t in enumerate(DOTS):
        p = [cells[f"hash, width {w}"]["hit"][i] for w in widths]
        if t < 0.2 or min(p) <= 0:
            continue
        square = 2 - 2 * t
        out.append({"dot": t, "measured": -analysis.exponent(widths, p).power, "stated": square / (4 - square)})
    return out


def text(record: dict[str, Any]) -> list[str]:
    found, config = record["summary"], record["config"]
    ratio, over = found["variance_ratio"], found["variance_over_closed"]
    some = [i for i, t in enumerate(DOTS) if t in (-0.5, 0.0, 0.5, 0.7, 0.9, 0.95, 0.99)]
    by = [found[f"errors, {r} rounds"] for r in config["rounds"]]
    rows = [(f"{DOTS[i]:g}", over[i], ratio[i], found["one_minus_p"][i], *(e[k][i] for e in by for k in SHADES)) for i in some]
    heads = [f"{k}, {r}" for r in config["rounds"] for k in SHADES]
    out = [f"Width {config['width']}, {config['features']} features, {config['draws']:,} draws; mean squared errors with hash rounds as named"]
    out += table(("q.k", "variance / closed", "Scatterbrain / Performer", "1 - p", *heads), rows)
    biases = ", ".join(f"{k.split(', ', 1)[1]} {v:.1f}" for k, v in found.items() if k.startswith("bias"))
    out += ["", f"Largest bias, in standard errors, over {len(DOTS) - 1} entries: {biases}", "Slope of -ln p in ln d, and tau^2 / (4 - tau^2):"]
    return out + table(("q.k", "measured", "stated"), [(f"{s['dot']:g}", s["measured"], s["stated"]) for s in found["slopes"]])


def plate(record: dict[str, Any]) -> Plate:
    found, config, cells = record["summary"], record["config"], record["cells"]
    panels = []
    for rounds in config["rounds"]:
        curves = tuple(
            Series(name=k.capitalize(), x=list(DOTS), y=[max(v, 1e-6) for v in e], colour=SHADES[k])
            for k, e in found[f"errors, {rounds} rounds"].items()
        )
        panels.append(Panel(title=f"error of an entry, {rounds} hash round(s)", x="q.k", y="mean squared error", series=curves, log_y=True))
    measured = tuple(
        Series(name=f"{name}, measured", x=list(DOTS), y=[max(v, 1e-6) for v in cells[name]["variance"]], kind="dots", colour=shade)
        for name, shade in (("Performer", LOW_RANK), ("Scatterbrain", BOTH), ("Performer, orthogonal", SPARSE)) if name in cells
    )  # fmt: skip
    formula = found["closed_performer"]
    less = [v * o for v, o in zip(formula, found["one_minus_p"], strict=True)]
    closed = tuple(
        Series(name=name, x=list(DOTS), y=[max(v, 1e-6) for v in y], kind="rule", colour=shade)
        for name, y, shade in (("closed form", formula, LOW_RANK), ("(1 - p) x closed form", less, BOTH))
    )
    panels.append(Panel(title="variance: Monte Carlo and closed form", x="q.k", y="variance", series=(*measured, *closed), log_y=True))
    shown = [c for c in cells.values() if "hit" in c]
    curves = tuple(Series(name=f"d = {c['width']}", x=list(DOTS), y=c["hit"]) for c in shown)
    rule = Series(name="formula, d = 64", x=list(DOTS), y=analysis.asymptotic_hit(dots(), 64).tolist(), kind="rule", colour="#22282e")
    panels.append(Panel(title="p, one cross-polytope hash", x="q.k", y="probability", series=(*curves, rule)))
    caption = (
        f"Unit vectors of width {config['width']}, {config['features']} independent features, {config['draws']:,} draws. Errors are for exp(q.k), "
        "not normalised: Reformer (1 - p) exp(2 q.k), Performer its variance, Scatterbrain (1 - p) times that, with p as measured."
    )
    return Plate(title="Theorem 2: bias, variance and the error of one entry", caption=caption, panels=tuple(panels))


STUDY = Study(
    name="variance",
    title="Theorem 2",
    about="bias and variance of Performer's and Scatterbrain's estimate of one entry, and p of the hash",
    config=VarianceConfig,
    cells=cells,
    summarize=summarize,
    text=text,
    plate=plate,
)
