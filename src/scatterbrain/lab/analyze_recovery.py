"""Does Robust PCA recover what was planted: a grid over rank and sparsity, as in Candes et al. 2011."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import analysis
from ..errors import require_int
from .plates import Heat, Panel, Plate
from .study import Cell, Study, option, table

RANKS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
DENSITIES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
SUCCESS = 1e-3  # relative error of the low-rank part: the criterion of that paper


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    size: int = option(100, "rows and columns")
    trials: int = option(3, "planted matrices in each cell")
    seed: int = option(0, "of the planted matrices")
    out: str = option("records", "folder for the record and the figures")

    def __post_init__(self) -> None:
        require_int(self.size, "size", least=20)
        require_int(self.trials, "trials")


def planted(size: int, rank: int, density: float, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Low-rank X Y' with N(0, 1 / size) factors, and signs at a random support: (count, size, size) each."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, count, size, rank, generator=generator, dtype=torch.float64) * size**-0.5
    support = torch.rand(count, size, size, generator=generator) < density
    signs = torch.randint(2, (count, size, size), generator=generator).double() * 2 - 1
    return x @ y.mT, signs * support


def cells(config: RecoveryConfig) -> Iterator[Cell]:
    for r in RANKS:
        for s in DENSITIES:
            yield f"rank {r:g}, density {s:g}", functools.partial(measure, config, r, s)


def measure(config: RecoveryConfig, rank: float, density: float) -> dict[str, Any]:
    low, sparse = planted(config.size, max(1, round(rank * config.size)), density, config.trials, config.seed)
    found = analysis.robust_pca(low + sparse)
    errors = analysis.relative_error(found.low_rank, low)
    return {
        "rank": rank,
        "density": density,
        "errors": errors.tolist(),
        "recovered": float((errors < SUCCESS).double().mean()),
        "converged": float(found.converged.double().mean()),
        "gap": float(found.gap.max()),
        "iterations": float(found.iterations.double().mean()),
    }


def summarize(config: dict[str, Any], cells: dict[str, Any]) -> dict[str, Any]:
    some = list(cells.values())
    easy = [c for c in some if c["rank"] <= 0.05 and c["density"] <= 0.1]
    return {
        "recovered_easy": min(c["recovered"] for c in easy),
        "worst_error_easy": max(max(c["errors"]) for c in easy),
        "recovered_hard": max(c["recovered"] for c in some if c["rank"] >= 0.3 and c["density"] >= 0.3),
        "converged": min(c["converged"] for c in some),
        "worst_gap": max(c["gap"] for c in some),
        "iterations": sum(c["iterations"] for c in some) / len(some),
    }


def grid(record: dict[str, Any], name: str) -> list[list[float | None]]:
    by = {(c["rank"], c["density"]): c[name] for c in record["cells"].values()}
    return [[by[r, s] for s in DENSITIES] for r in RANKS]


def text(record: dict[str, Any]) -> list[str]:
    found = record["summary"]
    rows = [(f"rank {r:g} n", *line) for r, line in zip(RANKS, grid(record, "recovered"), strict=True)]
    said = f"Recovered (relative error of the low-rank part below {SUCCESS:g}), share of trials; columns: density of the sparse part"
    end = (
        f"rank <= 0.05 n and density <= 0.1: worst error {found['worst_error_easy']:.1e}; "
        f"runs that converged, at least: {found['converged']:.0%} of a cell; "
        f"worst duality gap {found['worst_gap']:.1e}"
    )
    return [said, *table(("", *(f"{s:g}" for s in DENSITIES)), rows), end]


def plate(record: dict[str, Any]) -> Plate:
    panels = tuple(
        Panel(
            title=title,
            x="density of the sparse part",
            y="rank / n",
            heat=Heat(z=grid(record, name), x=list(DENSITIES), y=list(RANKS), low=0, high=high, numbers=True),
        )
        for name, title, high in (("recovered", "share of trials recovered", 1.0), ("iterations", "iterations", None))
    )
    size = record["config"]["size"]
    caption = (
        f"Principal component pursuit on planted {size} x {size} matrices, lambda = 1 / sqrt(n); "
        f"recovered: error of the low-rank part below {SUCCESS:g}."
    )
    return Plate(title="Robust PCA recovers planted sparse + low-rank matrices", caption=caption, panels=panels)


STUDY = Study(
    name="recovery",
    title="Robust PCA",
    about="Robust PCA on planted sparse + low-rank matrices: where it recovers them",
    config=RecoveryConfig,
    cells=cells,
    summarize=summarize,
    text=text,
    plate=plate,
)
