"""Errors against softmax attention, and times taken side by side, of methods at equal budgets."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import scatterbrain as sb

from ..errors import require

AGREE = 1e-3
LEAST = 16
OURS = "Scatterbrain, the default"
CHECKED = 512
WIDEST = 256  # values a native kernel takes
Forward = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One kind of attention to measure. The matrix error is taken on the first `matrix_heads` heads of each batch item."""

    name: str
    about: str
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    matrix_heads: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table. matrix_error is None where the method holds no matrix; budget and entries are those spent."""

    data: str
    method: str
    entries: float
    budget: float
    matrix_error: float | None
    output_error: float
    agreement: float | None
    seconds: float = math.inf

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def methods(entries: int, budget: float, seed: int = 0) -> dict[str, dict[str, Any]]:
    """What the demo compares, at `entries` a query row: arguments of `scatterbrain.attention`. The default draws nothing at random."""
    p = sb.presets
    return {
        "SMYRF": p.smyrf(entries, seed=seed),
        "Performer": p.performer(entries, seed=seed),
        "SMYRF + Performer, naive sum": p.naive_sum(entries, seed=seed),
        "Scatterbrain as published": p.scatterbrain(entries, seed=seed),
        OURS: {"budget": budget},
    }


def fused_softmax(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def naive_softmax(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return torch.softmax(q @ k.mT * scale, -1) @ v


EXACT: dict[str, Forward] = {"softmax, fused (SDPA)": fused_softmax, "softmax, naive": naive_softmax}


def affordable(budget: float, keys: int) -> int:
    entries = round(budget * keys)
    rule = f"leave at least {LEAST} entries a row"
    require(entries >= LEAST, "budget", rule, f"{budget} of {keys:,} keys", "raise the budget or lengthen the input")
    return entries


class Measurement:
    """All methods on one input: first every error, then the times, in turns."""

    def __init__(self, inputs: Inputs, budget: float, repeats: int) -> None:
        self.inputs, self.budget, self.repeats = inputs, budget, repeats
        self.methods = methods(affordable(budget, inputs.k.shape[2]), budget)
        self.steps = (1 + repeats) * (len(EXACT) + len(self.methods))

    def run(self, tick: Callable[[str], None]) -> list[Row]:
        """`tick` hears of every step done, for a progress bar."""
        truth, rows = true_output(self.inputs), {}
        for name, forward in EXACT.items():
            rows[name] = self.exact(name, forward, truth)
            tick(name)
        for name, method in self.methods.items():
            rows[name] = self.errors(name, method, truth)
            tick(name)
        forwards = EXACT | {name: torch_forward(method) for name, method in self.methods.items()}
        seconds = self.times(forwards, tick)
        return [dataclasses.replace(row, seconds=seconds[name]) for name, row in rows.items()]

    def exact(self, name: str, forward: Forward, truth: Tensor) -> Row:
        data = self.inputs
        error = head_error(forward(data.q, data.k, data.v, data.scale), truth)
        entries = float(data.k.shape[2])
        return Row(data=data.name, method=name, entries=entries, budget=1.0, matrix_error=None, output_error=error, agreement=None)

    def errors(self, name: str, method: dict[str, Any], truth: Tensor) -> Row:
        data = self.inputs
        worst = check_agreement(data, name, self.budget)
        spent = sb.explain(data.q, data.k, data.v, scale=data.scale, **method)
        return Row(
            data=data.name,
            method=name,
            entries=spent.entries_sparse + spent.entries_low_rank,
            budget=spent.budget,
            matrix_error=matrix_error(data, method),
            output_error=head_error(torch_forward(method)(data.q, data.k, data.v, data.scale), truth),
            agreement=worst,
        )

    def times(self, forwards: dict[str, Forward], tick: Callable[[str], None]) -> dict[str, float]:
        """The least of `repeats`, one of each method in turn, so that a disturbance hits all alike."""
        data, best = self.inputs, dict.fromkeys(forwards, math.inf)
        with torch.no_grad():
            for _ in range(self.repeats):
                for name, forward in forwards.items():
                    start = time.perf_counter()
                    forward(data.q, data.k, data.v, data.scale)
                    best[name] = min(best[name], time.perf_counter() - start)
                    tick(name)
        return best


def torch_forward(method: dict[str, Any]) -> Forward:
    return lambda q, k, v, scale: sb.attention(q, k, v, scale=scale, impl="torch", **method)


def check_agreement(data: Inputs, name: str, budget: float) -> float:
    """Raises where the fast output is not the reference's: a wrong result has no time and no error."""
    worst = disagreement(data, name, budget)
    remedy = "report it: a result that is wrong is not timed"
    require(worst <= AGREE, name, f"agree with the reference within {AGREE:g} (relative Frobenius)", f"{worst:.2g}", remedy)
    return worst


def disagreement(data: Inputs, name: str, budget: float) -> float:
    """How far the fast implementation is from the reference on the first tokens of two heads: output and weights.

    The reference holds tokens x tokens x features numbers, so it cannot take a whole long input.
    """
    q, k, v = (t[:1, :2, :CHECKED] for t in (data.q, data.k, data.v))
    method = methods(round(budget * k.shape[2]), budget)[name]
    return from_reference(lambda q, k, v: torch_forward(method)(q, k, v, data.scale), q, k, v, scale=data.scale, **method)


def from_reference(forward: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, **call: Any) -> float:
    """The worst head's distance to `attention(q, k, v, **call)` of the reference: output and weights, which are attention to the identity."""
    out, weights = sb.attention(q, k, v, impl="reference", return_weights=True, **call)
    m = k.shape[2]
    columns = torch.eye(m, dtype=k.dtype).expand(*k.shape[:2], m, m).split(WIDEST, -1)
    got = torch.cat([forward(q, k, some) for some in columns], -1)
    return max(float(head_errors(forward(q, k, v), out).max()), float(head_errors(got, weights).max()))


def matrix_error(data: Inputs, method: dict[str, Any]) -> float:
    """Mean over `matrix_heads`. Attention to the identity is the matrix itself, as the implementation that is timed weighs it."""
    m, forward, errors = data.k.shape[2], torch_forward(method), []
    heads = max(1, 2**24 // (data.q.shape[2] * m))
    for item in range(data.q.shape[0]):
        for first in range(0, data.matrix_heads, heads):
            piece = slice(first, min(first + heads, data.matrix_heads))
            q, k = data.q[item : item + 1, piece], data.k[item : item + 1, piece]
            weights = forward(q, k, torch.eye(m).expand(*k.shape[:2], m, m), data.scale)
            errors.append(head_errors(weights, torch.softmax(q @ k.mT * data.scale, -1)))
    return float(torch.cat(errors).mean())


def true_output(data: Inputs) -> Tensor:
    """Softmax attention in float64, a head at a time."""
    out = torch.empty(*data.q.shape[:3], data.v.shape[3], dtype=torch.float64)
    for b in range(out.shape[0]):
        for h in range(out.shape[1]):
            q, k, v = (t[b, h].double() for t in (data.q, data.k, data.v))
            out[b, h] = naive_softmax(q, k, v, data.scale)
    return out


def head_errors(got: Tensor, true: Tensor) -> Tensor:
    """Relative Frobenius error of each head; 1 is what predicting zero gives."""
    got, true = (t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in (got, true))
    return ((got - true).flatten(2).norm(dim=-1) / true.flatten(2).norm(dim=-1)).flatten()


def head_error(got: Tensor, true: Tensor) -> float:
    return float(head_errors(got, true).mean())
