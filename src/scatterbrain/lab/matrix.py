"""`scatterbrain errors`: how far methods are from the attention matrix of real models, ours beside every baseline and the oracles."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..analysis.oracles import rank_for, relative_error, top_k, truncated_svd
from ..analysis.robust_pca import at_budget, robust_pca
from ..calibration.capture import capture
from ..calibration.evaluate import evaluate
from ..calibration.measure import Capture
from ..calibration.plan import aligned
from ..errors import require
from .quality import OURS, Ours
from .rivals import BOTH_WAYS, Named
from .rows import Rows, check_common, in_unit
from .subjects import CARRIED, Subject, held_out_inputs, load

KIND = "scatterbrain-errors"
# of the matrix as it is: rows of the top-k preset are normalised again, as attention over those keys is
BEST, SVD, RPCA = "best entries (oracle)", "truncated SVD (oracle)", "Robust PCA (oracle)"
ORACLES = {BEST: 24, SVD: 24, RPCA: 6}  # heads, evenly spread: an N^3 each for the SVD, and many of them for Robust PCA
METHODS = (OURS, *BOTH_WAYS, *ORACLES)


@dataclass(frozen=True, kw_only=True)
class ErrorsConfig:
    """What to measure; inputs are others than those that plans are made on. Rows that the record holds are kept unless `fresh`."""

    data: tuple[str, ...] = CARRIED
    budgets: tuple[float, ...] = (1 / 4, 1 / 8, 1 / 16, 1 / 32)
    methods: tuple[str, ...] = METHODS
    inputs: int = 1
    plans: str | None = None
    seed: int = 0
    threads: int | None = None
    out: str = "records/errors.json"
    fresh: bool = False

    def __post_init__(self) -> None:
        check_common(self.data, self.methods, METHODS)
        require(all(map(in_unit, self.budgets)), "budgets", "lie in (0, 1]", self.budgets, "pass shares of the entries, such as 1/8")


def run(config: ErrorsConfig, command: str = "") -> Path:
    """Measure what the record lacks, print a table a model; returns where the record is."""
    rows = Rows.open(KIND, ("model", "budget", "method"), config, command)
    for name in config.data:
        todo = [(b, m) for b in config.budgets for m in config.methods if not rows.find(model=name, budget=b, method=m)]
        if not todo:
            continue
        subject = load(name)
        inputs, about = held_out_inputs(subject, config.inputs)
        for budget, method in todo:
            start = time.perf_counter()
            found = one(config, subject, budget, method, inputs[: config.inputs])
            print(f"{name} at {budget:g}: {method} {found.get('error', found['note'])}", flush=True)
            row = {"model": name, "budget": budget, "method": method, "inputs": about, **found}
            rows.put({**row, "seconds": time.perf_counter() - start})
    print("\n\n".join(table(rows.rows, name) for name in config.data))
    print(f"\nrecord  {config.out}")
    return rows.path


def one(config: ErrorsConfig, subject: Subject, budget: float, method: str, inputs: list[Any]) -> dict[str, Any]:
    """Mean matrix error over heads, that of the output, and the share of the entries that was spent."""
    if method in ORACLES:
        heads = some_heads(subject, inputs, ORACLES[method])
        errors = [decomposed(method, *head, budget) for head in heads]
        error, output = (sum(e) / len(errors) for e in zip(*errors, strict=True))
        return {"error": error, "output_error": output, "spent": budget, "note": f"of {len(errors)} heads"}
    if method == OURS:
        plan: Any = Ours(subject, budget, config.plans, seed=config.seed).plan()
        note = f"plan made on {plan.about.get('text', 'inputs unknown')}"
    else:
        plan, note = Named(method, budget), ""
        if why := plan.refusal(subject.causal):
            return {"error": None, "output_error": None, "spent": None, "note": f"not causal: {why}"}
    report = evaluate(subject.part, plan, inputs, seed=config.seed, progress=False)
    return {"error": report.error, "output_error": report.output_error, "spent": report.budget, "note": note}


def some_heads(subject: Subject, inputs: list[Any], count: int) -> list[tuple[Tensor, Tensor, bool]]:
    """Softmax matrix and values of evenly spread heads, and whether it is causal."""
    kept = [c for watcher in capture(subject.part, inputs[:1]).values() for c in watcher.kept]
    pairs = [(c, head) for c in kept for head in range(c.heads)]
    return [softmax_of(c, head) for c, head in pairs[:: -(-len(pairs) // count)]]


def softmax_of(c: Capture, head: int) -> tuple[Tensor, Tensor, bool]:
    shared = head * c.k.shape[1] // c.heads
    q, k, v = c.q[0, head].double(), c.k[0, shared].double(), c.v[0, shared].double()
    logits = q @ k.mT * (q.shape[1] ** -0.5 if c.scale is None else c.scale)
    if c.causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).tril().logical_not(), -torch.inf)
    return torch.softmax(logits, -1), v, c.causal


def decomposed(method: str, matrix: Tensor, v: Tensor, causal: bool, budget: float) -> tuple[float, float]:
    """Matrix and output error of the largest entries a row, of the best of a rank, or of Robust PCA cut to the budget. One rank costs a
    number a query and one a key."""
    entries = budget * matrix.shape[1] * (0.5 if causal else 1.0)
    if method == BEST:
        got = top_k(matrix, round(entries))
    elif method == SVD:
        got = truncated_svd(matrix, rank_for(entries, matrix.shape))
    else:
        got = at_budget(robust_pca(matrix.float()), matrix.float(), entries).whole.to(matrix.dtype)
    return float(relative_error(got, matrix)), float(relative_error(got @ v, matrix @ v))


def table(rows: list[dict[str, Any]], model: str) -> str:
    """A line a method; matrix error, output error and share spent at each budget."""
    mine = [row for row in rows if row["model"] == model]
    budgets = sorted({row["budget"] for row in mine}, reverse=True)
    lines: list[tuple[str, ...]] = [("method", *(f"{what} {b:.4g}" for b in budgets for what in ("error", "output", "spent")))]
    for method in METHODS:
        cells: list[str] = []
        for budget in budgets:
            row = next((row for row in mine if (row["method"], row["budget"]) == (method, budget)), {})
            cells += ["" if row.get(name) is None else f"{row[name]:.4g}" for name in ("error", "output_error", "spent")]
        if any(cells):
            lines.append((method, *cells))
    return "\n".join([model, *aligned(lines, right=tuple(range(1, len(lines[0]))))])
