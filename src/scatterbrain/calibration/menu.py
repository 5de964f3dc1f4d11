"""The recipes that are tried for a head, sized for a budget. What is not here was measured and did not pay: docs/calibration.md."""

from __future__ import annotations

from typing import Any

from .recipe import Recipe

# shares of the budget: means, columns, window
BOTH_WAYS = (
    (0.42, 0.06, 0.12),
    (0.30, 0.06, 0.12),
    (0.55, 0.06, 0.12),
    (0.42, 0.00, 0.12),
    (0.42, 0.06, 0.00),
    (0.42, 0.06, 0.35),
    (0.25, 0.25, 0.06),
    (0.15, 0.03, 0.06),
)
# shares of the budget: clusters, columns, window; and the chunk that clusters are formed in
CAUSAL = (
    (1 / 16, 0.10, 0.15, 256),
    (1 / 16, 0.20, 0.30, 256),
    (1 / 8, 0.04, 0.08, 128),
    (1 / 8, 0.30, 0.55, 128),
    (1 / 4, 0.10, 0.15, 128),
    (1 / 4, 0.20, 0.30, 128),
    (1 / 4, 0.20, 0.30, 64),
    (1 / 4, 0.10, 0.50, 256),
    (1 / 2, 0.10, 0.50, 64),
    (1 / 2, 0.30, 0.55, 64),
    (1 / 2, 0.10, 0.50, 128),
    (1 / 2, 0.30, 0.55, 256),
    (1.0, 0.04, 0.08, 128),
    (1.0, 0.10, 0.50, 128),
    (1.0, 0.10, 0.50, 64),
    (2.0, 0.30, 0.55, 64),
)
INNER = 0.15  # of the budget at most for the means of a query's own chunk
# what goes to visited clusters, as shares of the budget
SPENDINGS = (0.0, 0.06, 0.14, 0.25, 0.4, 0.6, 0.9, 1.4, 2.2)
PAPER = 0.25  # of the entries to the low-rank part: 3:1


def menu(budget: float, length: int, causal: bool) -> list[Recipe]:
    """Their thresholds are still open (0)."""
    seen = (length + 1) // 2 if causal else length
    found: dict[str, Recipe] = {}
    for recipe in _causal(budget, length) if causal else _both_ways(budget, length):
        method = recipe.method(length, causal)
        found.setdefault(f"{method} {seen}", recipe)
    return list(found.values())


def _both_ways(budget: float, length: int) -> list[Recipe]:
    shares = [tuple(min(1.0, budget * x) for x in shares) for shares in BOTH_WAYS]
    return [Recipe(budget=budget, means=m, columns=c, window=w, gain=0.0, length=length) for m, c, w in shares]


def _causal(budget: float, length: int) -> list[Recipe]:
    found = []
    for share, columns, window, chunk in CAUSAL:
        while chunk > max(8, length // 4):
            chunk //= 2
        inner = min(chunk, inner_of(budget, length, chunk) * (2 if share < 1 / 8 and chunk > 64 else 1))
        per_chunk = min(max(1, round(share * budget * chunk)), max(1, chunk // 2))
        shares: dict[str, Any] = {"columns": min(1.0, budget * columns), "window": min(1.0, budget * window), "means": min(1.0, per_chunk / chunk)}
        found.append(Recipe(budget=budget, gain=0.0, length=length, chunk=chunk, per_chunk=per_chunk, inner=inner, **shares))
    return found


def inner_of(budget: float, length: int, chunk: int) -> int:
    """Block size inside a query's own chunk."""
    inner = 8
    while inner < chunk and chunk / (2 * inner) > INNER * budget * length / 2:
        inner *= 2
    return inner


def paper(budget: float, length: int, causal: bool, entropy_ratio: float) -> Recipe:
    """The paper's rule: 3:1 sparse to low-rank where entropy is average, more low-rank where it is high."""
    low = round(min(0.6, max(0.1, PAPER * entropy_ratio)) * 20) / 20  # few different ones
    if causal:
        chunk = 64 if budget >= 0.09 else 128 if budget >= 0.045 else 256
        inner = inner_of(budget, length, chunk)
        per_chunk = max(1, round(low * budget * chunk))
        common: dict[str, Any] = {"chunk": chunk, "per_chunk": min(per_chunk, chunk // 2), "inner": inner}
        return Recipe(budget=budget, means=per_chunk / chunk, columns=0.2 * budget, window=0.3 * budget, gain=0.0, length=length, **common)
    return Recipe(budget=budget, means=low * budget, columns=0.06 * budget, window=0.12 * budget, gain=0.0, length=length)
