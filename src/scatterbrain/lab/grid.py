"""The matrix error of every method on Process 1 over a grid of cluster sizes and temperatures, at one budget."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

import scatterbrain as sb

from .measure import Inputs, affordable, check_agreement, matrix_error, methods
from .process1 import Process1

CLUSTER_SIZES = (4, 16, 64)
BETA_FACTORS = (0.25, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method at one cell: the matrix error of each draw, and the budget spent, mean over draws."""

    method: str
    cluster_size: int
    beta_factor: float
    budget: float
    errors: tuple[float, ...]

    @property
    def error(self) -> float:
        """Of the draws the median: positive random features have rare draws that would decide a mean."""
        return statistics.median(self.errors)

    @property
    def place(self) -> tuple[int, float]:
        return self.cluster_size, self.beta_factor

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "error": self.error}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A method's errors over the cells; `worst_draw` is the largest single one."""

    method: str
    budget: float
    least: float
    median: float
    most: float
    worst_draw: float


class Grid:
    """Every cell on data like `process`, one head; draw number i takes its data and its methods' random numbers from seed + i."""

    def __init__(self, process: Process1, budget: float, draws: int, seed: int) -> None:
        self.process, self.budget, self.draws, self.seed = process, budget, draws, seed
        self.entries = affordable(budget, process.n)
        self.places = tuple(product(CLUSTER_SIZES, BETA_FACTORS))
        self.steps = len(self.places)

    def run(self, tick: Callable[[str], None]) -> list[Cell]:
        """On one thread: work this small gains nothing from more, and on a busy machine waits for them, 35 times longer."""
        cells, threads = [], torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for size, factor in self.places:
                cells += self.cells(size, factor)
                tick(f"clusters of {size}, beta x {factor:g}")
        finally:
            torch.set_num_threads(threads)
        return cells

    def cells(self, size: int, factor: float) -> list[Cell]:
        inputs = [self.inputs(size, factor, self.seed + draw) for draw in range(self.draws)]
        for method in methods(self.entries, self.budget):
            check_agreement(inputs[0], method, self.budget)
        return [self.cell(method, size, factor, inputs) for method in methods(self.entries, self.budget)]

    def inputs(self, size: int, factor: float, seed: int) -> Inputs:
        process = dataclasses.replace(self.process, cluster_size=size, beta_factor=factor)
        z, _ = process.sample(torch.Generator().manual_seed(seed))
        return Inputs(name="Process 1", about="", q=z, k=z, v=z, scale=process.scale, matrix_heads=1)

    def cell(self, name: str, size: int, factor: float, inputs: list[Inputs]) -> Cell:
        errors, spent = [], []
        for seed, data in enumerate(inputs, self.seed):
            method = methods(self.entries, self.budget, seed)[name]
            errors.append(matrix_error(data, method))
            spent.append(sb.explain(data.q, data.k, data.v, scale=data.scale, **method).budget)
        return Cell(method=name, cluster_size=size, beta_factor=factor, budget=statistics.mean(spent), errors=tuple(errors))


def spreads(cells: list[Cell]) -> list[Spread]:
    """One for each method, in the order of the cells."""
    return [_spread(method, [cell for cell in cells if cell.method == method]) for method in dict.fromkeys(cell.method for cell in cells)]


def _spread(method: str, cells: list[Cell]) -> Spread:
    errors = sorted(cell.error for cell in cells)
    return Spread(
        method=method,
        budget=statistics.mean(cell.budget for cell in cells),
        least=errors[0],
        median=statistics.median(errors),
        most=errors[-1],
        worst_draw=max(max(cell.errors) for cell in cells),
    )


def ranked(cells: list[Cell], method: str) -> list[tuple[int, float]]:
    """The places of the grid, the method's least error first."""
    return [cell.place for cell in sorted((cell for cell in cells if cell.method == method), key=lambda cell: cell.error)]
