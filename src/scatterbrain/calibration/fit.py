"""Captured attention in, a recipe for every head out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import require
from .measure import Capture, HeadFit, entries_of, error_of, look
from .recipe import Recipe

POLICIES = ("measured", "paper", "default")
Progress = Callable[[int, int, str], None]


def fit(
    captures: Mapping[str, Sequence[Capture]],
    budget: float | None = None,
    *,
    error: float | None = None,
    policy: str = "measured",
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, list[HeadFit]]:
    """Recipes for every head of every layer: at an average `budget`, or the smallest one with mean error at most `error`.

    `progress(done, all, layer)` is told of every layer done.
    """
    one = (budget is None) != (error is None)
    require(one, "budget and error", "be given one at a time", (budget, error), "pass budget=1/8, or error=0.05")
    require(policy in POLICIES, "policy", f"be one of {', '.join(POLICIES)}", policy, "pick one of them")
    require(len(captures) > 0, "captures", "hold a layer", "none", "run the model on some inputs first")
    share = 1 / 8 if budget is None else budget
    out: dict[str, list[HeadFit]] = {}
    for done, (name, seen) in enumerate(captures.items()):
        require(len(seen) > 0, name, "hold a capture", "none", "run the model on some inputs first")
        out[name] = _layer(seen, Recipe.default(share), seed)
        if progress is not None:
            progress(done + 1, len(captures), name)
    return out


def _layer(captures: Sequence[Capture], recipe: Recipe, seed: int) -> list[HeadFit]:
    """Means over the batch items of all captures."""
    rows: list[Tensor] = []
    for c in captures:
        s, method = look(c, seed), recipe.method(c.k.shape[2], c.causal)
        spent, visible = entries_of(c, method)
        found = torch.stack([t.double() for t in (s.entropy, error_of(c, s, method), spent, spent / visible, s.window_mass, s.column_mass)])
        rows.append(found.unflatten(1, (-1, c.heads)))
    mean = torch.cat(rows, 1).mean(1)
    names = ("entropy", "error", "entries", "budget", "window_mass", "column_mass")
    return [HeadFit(recipe=recipe, **dict(zip(names, head, strict=True))) for head in mean.T.tolist()]
