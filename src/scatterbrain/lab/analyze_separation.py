"""The separation examples 1 and 2: parameters that each kind of approximation needs for one error, against n."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .. import analysis
from ..errors import require, require_int
from .plates import BOTH, LOW_RANK, SPARSE, Panel, Plate, Series
from .study import Cell, Study, option, table

KINDS = {"low_rank": ("low-rank", LOW_RANK), "sparse": ("sparse", SPARSE), "both": ("diagonal + low-rank", BOTH)}
TARGETS = (0.1, 0.25, 0.5, 0.9, 1.1)  # of n, in example 2


@dataclass(frozen=True, kw_only=True)
class SeparationConfig:
    lengths: tuple[int, ...] = option((256, 512, 1024, 2048), "tokens; the recorded run goes to 4096")
    gamma: float = option(0.25, "example 1: the error asked for is gamma sqrt(n)")
    epsilon: float = option(0.25, "example 2: off-diagonal logits are about this large")
    seed: int = option(0, "of the draws")
    out: str = option("records", "folder for the record and the figures")

    def __post_init__(self) -> None:
        for n in self.lengths:
            require_int(n, "lengths", least=32)
        require(len(self.lengths) >= 2, "lengths", "name at least two, to fit an exponent", self.lengths, "pass 256 512 1024")
        require(0 < self.gamma <= 1, "gamma", "lie in (0, 1]", self.gamma, "pass 0.25")
        require(0 < self.epsilon <= 0.5, "epsilon", "lie in (0, 0.5]", self.epsilon, "pass 0.25")


def cells(config: SeparationConfig) -> Iterator[Cell]:
    for n in config.lengths:
        yield f"example 1, {n} tokens", functools.partial(first, config, n)
        yield f"example 2, {n} tokens", functools.partial(second, config, n)


def first(config: SeparationConfig, n: int) -> dict[str, Any]:
    """The paper's width, 6 sqrt(n) log(n) / gamma, is above n for every n here; sqrt(n) / gamma is enough, and is used."""
    stated = math.ceil(6 * math.sqrt(n) * math.log(n) / config.gamma)
    d = math.ceil(math.sqrt(n) / config.gamma)
    q = analysis.sign_matrix(n, d, 1.0, torch.Generator().manual_seed(config.seed + n))
    epsilon = math.sqrt(config.gamma) / n**0.25
    wide = analysis.sign_matrix(n, stated, 1.0, torch.Generator().manual_seed(config.seed)).float()
    overlap = analysis.largest_overlap(wide) / epsilon
    matrix = torch.exp(q @ q.mT)
    target = config.gamma * math.sqrt(n)
    own = torch.linalg.matrix_norm(matrix - (math.e - 2) * torch.eye(n) - 1 - q @ q.mT)
    found = analysis.needs(matrix, target, math.e - 2)
    half = analysis.symmetric_tail(matrix)[n // 2]
    return {"example": 1, "n": n, "d": d, "stated_d": stated, "overlap": overlap, "target": target, "papers_estimator": float(own),
            "papers_parameters": n * (d + 2), "low_rank_at_half": float(half), **asdict(found)}  # fmt: skip


def second(config: SeparationConfig, n: int) -> dict[str, Any]:
    """Width as stated, 6 r log(n) / epsilon^2 with r = log n, which is drawn as a Gram matrix in pieces."""
    r = math.log(n)
    d = math.ceil(6 * r * math.log(n) / config.epsilon**2)
    q = analysis.sign_matrix(n, d, r, torch.Generator().manual_seed(config.seed + n))
    overlap = analysis.largest_overlap(q)
    matrix = torch.exp(q @ q.mT)
    own = torch.linalg.matrix_norm(matrix - (math.exp(r) - 1) * torch.eye(n) - 1)
    by = {f"{t:g}": asdict(analysis.needs(matrix, t * n, math.exp(r) - 1)) for t in TARGETS}
    return {"example": 2, "n": n, "d": d, "overlap": overlap, "epsilon": config.epsilon, "papers_estimator": float(own), "targets": by}


def summarize(config: dict[str, Any], cells: dict[str, Any]) -> dict[str, Any]:
    ones, twos = ([c for c in cells.values() if c["example"] == e] for e in (1, 2))
    sizes = [c["n"] for c in ones]
    out: dict[str, Any] = {"example 1": {k: asdict(analysis.exponent(sizes, [c[k] for c in ones])) for k in KINDS}}
    out["example 1"]["overlap_over_epsilon"] = max(c["overlap"] for c in ones)
    for t in TARGETS:
        name = f"{t:g}"
        out[f"example 2, error {name} n"] = {
            k: asdict(analysis.exponent(sizes, [max(1, c["targets"][name][k]) for c in twos])) for k in KINDS
        }  # fmt: skip
    out["overlap_over_epsilon"] = {str(c["n"]): c["overlap"] / c["epsilon"] for c in twos}
    return out


def text(record: dict[str, Any]) -> list[str]:
    ones, twos = ([c for c in record["cells"].values() if c["example"] == e] for e in (1, 2))
    gamma = record["config"]["gamma"]
    out = [f"Example 1: parameters for an error of {gamma:g} sqrt(n), as shares of n^2 (width sqrt(n) / gamma; the paper's is in brackets)"]
    rows = [(str(c["n"]), f"{c['d']} ({c['stated_d']})", *(c[k] / c["n"] ** 2 for k in KINDS), c["papers_estimator"] / c["target"]) for c in ones]
    out += table(("n", "width", *(v[0] for v in KINDS.values()), "their estimator / target"), rows)
    out += ["", "Example 2: parameters over n, by the error asked for (in units of n); overlap: largest off-diagonal logit over epsilon"]
    rows = [
        (str(c["n"]), f"{t:g} n", *(c["targets"][f"{t:g}"][k] / c["n"] for k in KINDS), c["overlap"] / c["epsilon"])
        for c in twos[-1:]
        for t in TARGETS
    ]
    out += table(("n", "error", *(v[0] for v in KINDS.values()), "overlap"), rows)
    out += ["", "Exponents of the number of parameters in n"]
    fits = [
        (name, *(f"{r[k]['power']:.2f} +- {r[k]['error']:.2f}" for k in KINDS)) for name, r in record["summary"].items() if name.startswith("example")
    ]
    return out + table(("", *(v[0] for v in KINDS.values())), fits)


def plate(record: dict[str, Any]) -> Plate:
    ones, twos = ([c for c in record["cells"].values() if c["example"] == e] for e in (1, 2))
    sizes = [c["n"] for c in ones]
    full = Series(name="n^2", x=sizes, y=[n**2 for n in sizes], kind="rule", colour="#22282e")
    gamma = record["config"]["gamma"]
    curves = tuple(Series(name=name, x=sizes, y=[c[k] for c in ones], colour=shade) for k, (name, shade) in KINDS.items())
    panels = [Panel(title=f"example 1: error {gamma:g} sqrt(n)", x="n", y="parameters", series=(*curves, full), log_x=True, log_y=True)]
    for t in (0.5, 1.1):
        curves = tuple(
            Series(name=name, x=sizes, y=[max(1, c["targets"][f"{t:g}"][k]) for c in twos], colour=shade) for k, (name, shade) in KINDS.items()
        )
        panels.append(Panel(title=f"example 2: error {t:g} n", x="n", y="parameters", series=(*curves, full), log_x=True, log_y=True))
    caption = (
        "Fewest stored numbers with which each kind reaches the error, found exactly (spectrum, sorted entries). Example 2 needs its constant: "
        "for an error above n the diagonal alone is enough, so that a sparse estimator needs n numbers, not n^2."
    )
    return Plate(title="Separation: parameters that each kind needs", caption=caption, panels=tuple(panels), columns=3)


STUDY = Study(
    name="separation",
    title="Separation examples",
    about="parameters that low-rank, sparse and both need for one error, against n, with fitted exponents",
    config=SeparationConfig,
    cells=cells,
    summarize=summarize,
    text=text,
    plate=plate,
)
