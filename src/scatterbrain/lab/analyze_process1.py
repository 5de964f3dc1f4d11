"""Process 1 on the sphere, and whether what it makes belongs to Matrix Class 1."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .. import analysis
from ..errors import require, require_int
from .plates import Cloud, Panel, Plate, Series
from .process1 import Process1
from .study import Cell, Study, option, table

WIDTHS = (1, 4, 16, 64)  # times log(n)^1.5
REACHES, PRECISIONS = (1.0, 2.0, 5.0, 10.0, 20.0), (0.1, 0.01)


@dataclass(frozen=True, kw_only=True)
class Process1Config:
    lengths: tuple[int, ...] = option((256, 1024, 4096), "tokens")
    cluster_size: int = option(4, "tokens in a cluster")
    delta_factor: float = option(0.5, "delta is this over log(n)^(1/4), as the process asks")
    deltas: tuple[float, ...] = option((0.05, 0.2, 0.6), "spreads shown on the sphere")
    draws: int = option(2, "of each cell")
    seed: int = option(0, "of the draws")
    out: str = option("records", "folder for the record and the figures")

    def __post_init__(self) -> None:
        for n in self.lengths:
            require_int(n, "lengths", least=8)
        require_int(self.draws, "draws")
        require_int(self.cluster_size, "cluster_size", least=2)
        require(0 < self.delta_factor <= 1, "delta_factor", "lie in (0, 1]", self.delta_factor, "pass 0.5")


def unit(n: int, d: int, cluster_size: int, delta: float, seed: int) -> tuple[Tensor, Tensor]:
    """z (n, d) and labels (n,) as the paper's proof takes them: |c| about 1, |r| about delta.

    The paper writes covariances I / sqrt(d) and I delta / sqrt(d), which give |c| = d^(1/4); its proof needs I / d and
    delta^2 I / d. This is the same data in other units.
    """
    z, label = Process1(n=n, d=d, cluster_size=cluster_size, delta=delta**2).sample(torch.Generator().manual_seed(seed))
    return z[0, 0].double() * d**-0.25, label[0]


def cells(config: Process1Config) -> Iterator[Cell]:
    for delta in config.deltas:
        yield f"sphere, delta {delta:g}", functools.partial(sphere, delta, config.seed)
    yield "degree of a polynomial", degrees
    for n in config.lengths:
        for factor in WIDTHS:
            yield f"{n} tokens, width factor {factor}", functools.partial(member, config, n, factor)


def degrees() -> dict[str, Any]:
    """The lemma that a polynomial of degree 10 (L + log(1 / eps)) is within eps of exp on [-L, L]."""
    rows = [(reach, eps, analysis.taylor_degree(reach, eps), math.ceil(10 * (reach + math.log(1 / eps)))) for reach in REACHES for eps in PRECISIONS]
    return {"kind": "degrees", "rows": rows}


def sphere(delta: float, seed: int, clusters: int = 12, size: int = 24) -> dict[str, Any]:
    """d = 3, where Gaussian centres would not be near the sphere: their directions are used."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.nn.functional.normalize(torch.randn(clusters, 3, generator=generator), dim=-1)
    points = centres[:, None] + torch.randn(clusters, size, 3, generator=generator) * delta / math.sqrt(3)
    group = [c for c in range(clusters) for _ in range(size)]
    return {"kind": "sphere", "delta": delta, "points": [[round(x, 3) for x in p] for p in points.flatten(0, 1).tolist()], "group": group}


def member(config: Process1Config, n: int, factor: int) -> dict[str, Any]:
    delta = config.delta_factor / math.log(n) ** 0.25
    d = math.ceil(factor * math.log(n) ** 1.5)
    found = []
    for draw in range(config.draws):
        found.append(asdict(analysis.membership(*unit(n, d, config.cluster_size, delta, config.seed + draw), delta)))
    mean = {name: sum(f[name] for f in found) / len(found) for name in found[0]}
    return {"kind": "class", "n": n, "d": d, "factor": factor, "delta": delta, **mean}


def summarize(config: dict[str, Any], cells: dict[str, Any]) -> dict[str, Any]:
    some = [c for c in cells.values() if c["kind"] == "class"]
    rows = next(c["rows"] for c in cells.values() if c["kind"] == "degrees")
    out: dict[str, Any] = {"degree_over_bound": max(need / bound for _, _, need, bound in rows)}
    return out | {
        f"factor {f}": {name: [c[name] for c in some if c["factor"] == f] for name in ("n", "within", "diagonal", "across", "widest")} for f in WIDTHS
    }


def text(record: dict[str, Any]) -> list[str]:
    names = ("n", "d", "delta", "worst_norm", "within", "diagonal", "across", "widest", "positive", "block_share", "delta_log_d")
    rows = [tuple(str(c[n]) if n in ("n", "d") else c[n] for n in names) for c in record["cells"].values() if c["kind"] == "class"]
    said = "Matrix Class 1 on Process 1: shares of pairs in the ranges it asks for (means over draws; l = 1 / (1 - delta^2))"
    headings = ("n", "d", "delta", "norm/delta", "same cluster", "diagonal", "across", "widest/delta", "in [0, delta]", "blocks", "delta log d")
    least = record["summary"]["degree_over_bound"]
    lemma = f"Degree that exp needs on [-L, L] (L up to {REACHES[-1]:g}): at most {least:.2f} of the lemma's 10 (L + log(1 / eps))"
    return [said, *table(headings, rows), "", lemma]


def plate(record: dict[str, Any]) -> Plate:
    spheres = [c for c in record["cells"].values() if c["kind"] == "sphere"]
    some = [c for c in record["cells"].values() if c["kind"] == "class"]
    panels = [Panel(title=f"spread delta = {c['delta']:g}", cloud=Cloud(points=c["points"], group=c["group"])) for c in spheres]
    for name, title in (
        ("across", "across clusters, in [-delta, delta]"),
        ("within", "same cluster, in [1/l, 2 - 1/l]"),
        ("diagonal", "|z|^2 in [1/l, 2 - 1/l]"),
    ):
        curves = [
            Series(name=f"d = {f} log(n)^1.5", x=[c["n"] for c in some if c["factor"] == f], y=[c[name] for c in some if c["factor"] == f])
            for f in WIDTHS
        ]
        panels.append(Panel(title=title, x="tokens n", y="share of pairs", series=tuple(curves), log_x=True, y_range=(0, 1.05)))
    caption = "Above: clusters near the unit sphere for three spreads (colour: cluster). Below: how often single entries of Z Z' meet Matrix Class 1."
    return Plate(title="Process 1 and Matrix Class 1", caption=caption, panels=tuple(panels), columns=3)


STUDY = Study(
    name="process1",
    title="Process 1",
    about="the generative model's picture on the sphere, and its membership of Matrix Class 1",
    config=Process1Config,
    cells=cells,
    summarize=summarize,
    text=text,
    plate=plate,
)
