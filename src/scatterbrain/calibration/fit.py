"""Captured attention in, a recipe for every head out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import require, require_int
from .allocate import Loss, Offer, allocate, error_loss, few, price, uniform
from .measure import Capture, HeadFit, entries_of, error_of, look
from .menu import SPENDINGS, menu, paper
from .recipe import Recipe
from .trial import ROWS, Curve, Trial, sample_rows

POLICIES = ("measured", "paper", "default")
LOOKED_AT = 512  # rows for entropy and masses
MARGIN = 0.985  # of the budget: other inputs may spend a little more
LADDER = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # menus among which the smallest budget for an error is sought
KINDS = 3
OBJECTIVES = ("model", "matrix")
Progress = Callable[[int, int, str], None]


def fit(
    captures: Mapping[str, Sequence[Capture]],
    budget: float | None = None,
    *,
    error: float | None = None,
    policy: str = "measured",
    objective: str = "matrix",
    kinds: int = KINDS,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, list[HeadFit]]:
    """Recipes for every head of every layer: at an average `budget`, or the smallest one with mean error at most `error`.

    policy    "measured": many recipes are tried, their thresholds from the first half of the captures, the least total loss under
              one budget for all heads is sought, and the other half says whether moving budget between heads pays. "paper": the
              same budget for each, more low-rank where the entropy is high. "default": the library's default at the budget.
    objective the loss of policy "measured". "matrix": a head's error. "model": that and what it does to the model's output, each
              over the least total it can have; captures must hold their `pull`.
    kinds     different recipes in a layer at most, under policy "measured": heads that share one share a call
    progress  `progress(done, all, layer)` is told of every layer done

    Cost: a few hundred sampled rows of every capture against all its keys, once a recipe; nothing N x N is held.
    """
    one = (budget is None) != (error is None)
    require(one, "budget and error", "be given one at a time", (budget, error), "pass budget=1/8, or error=0.05")
    for name, value in (("budget", budget), ("error", error)):
        require(value is None or 0 < value <= 1, name, "lie in (0, 1]", value, "pass a share, such as 1/8")
    require(policy in POLICIES, "policy", f"be one of {', '.join(POLICIES)}", policy, "pick one of them")
    require(error is None or policy == "measured", "policy", "be 'measured' when an error is asked for", policy, "pass a budget instead")
    check_objective(objective, error, policy)
    require_int(kinds, "kinds")
    require(len(captures) > 0, "captures", "hold a layer", "none", "run the model on some inputs first")
    looks, offers = {}, {}
    for done, (name, seen) in enumerate(captures.items()):
        require(len(seen) > 0, name, "hold a capture", "none", "run the model on some inputs first")
        felt = objective == "matrix" or all(c.pull is not None for c in seen)
        require(felt, name, "hold captures with their pull", "none", "pass objective='matrix', or calibrate a model")
        looks[name] = _looks(seen, seed)
        offers[name] = _offers(seen, budget, policy, looks[name])
        if progress is not None:
            progress(done + 1, len(captures), name)
    chosen = iter(_choose(list(offers.values()), budget, error, policy, objective, kinds))
    felt = policy == "measured" and objective == "model"
    return {name: [_head(next(chosen), stats, felt) for stats in looks[name]] for name in captures}


def check_objective(objective: str, error: float | None, policy: str) -> None:
    require(objective in OBJECTIVES, "objective", f"be one of {', '.join(map(repr, OBJECTIVES))}", objective, "pick one of them")
    plain = objective == "matrix" or (error is None and policy == "measured")
    rule = "be 'matrix' where an error is asked for, or another policy than 'measured'"
    require(plain, "objective", rule, objective, "leave it out")


def _head(offer: Offer, stats: dict[str, float], felt: bool) -> HeadFit:
    spent = {"entries": offer.entries, "budget": offer.held_cost, "cluster_mass": offer.mass}
    return HeadFit(recipe=offer.recipe, error=offer.held_error, harm=offer.held_harm if felt else math.nan, **spent, **stats)


def _looks(captures: Sequence[Capture], seed: int) -> list[dict[str, float]]:
    """Each head's means over captures and batch items."""
    rows = []
    for c in captures:
        s = look(c, seed, limit=LOOKED_AT)
        rows.append(torch.stack([t.double() for t in (s.entropy, s.window_mass, s.column_mass)]).unflatten(1, (-1, c.heads)))
    mean = torch.cat(rows, 1).mean(1)
    names = ("entropy", "window_mass", "column_mass")
    return [dict(zip(names, head, strict=True)) for head in mean.T.tolist()]


def _offers(captures: Sequence[Capture], budget: float | None, policy: str, looks: list[dict[str, float]]) -> list[list[Offer]]:
    """Of each head. Those that decide come from the first half of the captures (or of the rows, where there is one)."""
    length, causal = captures[0].k.shape[2], captures[0].causal
    if policy == "default":
        return _default(captures, Recipe.default(budget or 1 / 8))
    if policy == "paper":
        assert budget is not None
        mean = sum(x["entropy"] for x in looks) / len(looks)
        recipes = [paper(budget, length, causal, x["entropy"] / max(mean, 1e-9)) for x in looks]
        tried = {recipe: _tried(captures, [recipe], budget) for recipe in recipes}
        return [tried[recipe][n] for n, recipe in enumerate(recipes)]
    offers: list[list[Offer]] = [[] for _ in looks]
    for share in LADDER if budget is None else (budget,):
        for head, more in zip(offers, _tried(captures, menu(share, length, causal), share), strict=True):
            head += more
    return offers


def _tried(captures: Sequence[Capture], recipes: Sequence[Recipe], budget: float) -> list[list[Offer]]:
    offers: list[list[Offer]] = [[] for _ in range(captures[0].heads)]
    half = (len(captures) + 1) // 2
    single = len(captures) == 1
    rows = max(48, 2 * ROWS // max(2, len(captures)))  # many captures need fewer of each
    deciding = [(c, sample_rows(c, rows, shift=0.25 if single else 0.5)) for c in captures[:half]]
    held = [(c, sample_rows(c, rows, shift=0.75)) for c in captures if single] + [(c, sample_rows(c, rows)) for c in captures[half:]]
    memos: dict[int, dict[object, object]] = {}
    for recipe in recipes:
        trials = [[_trial(c, recipe, rows, memos) for c, rows in part] for part in (deciding, held)]
        visible = trials[0][0].visible.sum(-1) / trials[0][0].live.sum(-1).clamp(min=1)
        levels = torch.tensor(SPENDINGS, dtype=torch.float64) * budget * float(visible.mean())
        gain = _mean([t.gains(levels) for t in trials[0]], captures[0].heads)
        curves = [_average([t.curve(gain.repeat(t.score.shape[0] // captures[0].heads, 1)) for t in part], captures[0].heads) for part in trials]
        _collect(offers, recipe, gain, *curves)
    return offers


def _trial(c: Capture, recipe: Recipe, rows: Tensor, memos: dict[int, dict[object, object]]) -> Trial:
    return Trial(c, recipe.method(c.k.shape[2], c.causal), rows, memos.setdefault(id(c), {}))


def _mean(per_group: list[Tensor], heads: int) -> Tensor:
    """(heads, L) from (B * heads, L) of every capture."""
    return torch.cat([t.double().unflatten(0, (-1, heads)) for t in per_group]).mean(0)


def _average(curves: list[Curve], heads: int) -> Curve:
    visible = _mean([c.visible[:, None] for c in curves], heads)[:, 0]
    entries = _mean([c.entries / c.visible[:, None] for c in curves], heads) * visible[:, None]
    error, harm, mass = (_mean([getattr(c, name) for c in curves], heads) for name in ("error", "harm", "mass"))
    return Curve(curves[0].gain, entries, error, harm, mass, visible)


def _collect(offers: list[list[Offer]], recipe: Recipe, gain: Tensor, decide: Curve, held: Curve) -> None:
    first, other = ((c.entries / c.visible[:, None], c.error, c.harm, c.mass, c.entries) for c in (decide, held))
    for n, head in enumerate(offers):
        for level in range(gain.shape[1]):
            cost, error, harm, _, _ = (float(t[n, level]) for t in first)
            held_cost, held_error, held_harm, mass, entries = (float(t[n, level]) for t in other)
            mine = dataclasses.replace(recipe, gain=round(float(gain[n, level]), 3), budget=min(1.0, max(cost, 1e-4)))
            head.append(Offer(mine, cost, error, entries, held_cost, held_error, harm, held_harm, mass))


def _default(captures: Sequence[Capture], recipe: Recipe) -> list[list[Offer]]:
    rows: list[Tensor] = []
    for c in captures:
        method = recipe.method(c.k.shape[2], c.causal)
        spent, visible = entries_of(c, method)
        rows.append(torch.stack([t.double() for t in (spent / visible, error_of(c, look(c), method), spent)]).unflatten(1, (-1, c.heads)))
    return [[Offer(recipe, cost, error, spent, cost, error)] for cost, error, spent in torch.cat(rows, 1).mean(1).T.tolist()]


def _choose(layers: list[list[list[Offer]]], budget: float | None, error: float | None, policy: str, objective: str, kinds: int) -> list[Offer]:
    heads = [head for layer in layers for head in layer]
    if policy == "default":
        return [head[0] for head in heads]
    if policy == "paper":
        assert budget is not None
        return uniform(heads, budget * MARGIN)
    if budget is None:
        assert error is not None
        return _least_budget(layers, error, kinds)
    loss, held_loss = _losses(heads, budget * MARGIN, objective)
    heads = _few(layers, kinds, loss, budget * MARGIN)
    options = []
    for way in (lambda b: allocate(heads, budget=b, loss=loss), lambda b: uniform(heads, b, loss)):
        chosen = way(budget * MARGIN)
        spent = _held(chosen)[0]
        options.append(way(budget * MARGIN**2 * budget / spent) if spent > budget * MARGIN else chosen)
    return min(options, key=lambda chosen: sum(map(held_loss, chosen)))


def _least_budget(layers: list[list[list[Offer]]], error: float, kinds: int) -> list[Offer]:
    heads, target = [head for layer in layers for head in layer], error
    heads = _few(layers, kinds, error_loss, sum(o.cost for o in allocate(heads, error=error)) / len(heads))
    for _ in range(4):  # until others, too, are within it
        chosen = allocate(heads, error=target)
        held = _held(chosen)[1]
        if held <= error:
            break
        target *= 0.98 * error / held
    return chosen


def _few(layers: list[list[list[Offer]]], kinds: int, loss: Loss, budget: float) -> list[list[Offer]]:
    unit = price([head for layer in layers for head in layer], budget, loss)
    return [head for layer in layers for head in few(layer, kinds, loss, unit)]


def _losses(heads: list[list[Offer]], budget: float, objective: str) -> tuple[Loss, Loss]:
    """What is to be small, over all inputs, and over those that thresholds do not come from."""

    def error(o: Offer) -> float:
        return (o.error + o.held_error) / 2

    def harm(o: Offer) -> float:
        return (o.harm + o.held_harm) / 2

    if objective == "matrix":
        return error, lambda o: o.held_error
    least_error, least_harm = (max(1e-30, sum(map(loss, allocate(heads, budget=budget, loss=loss)))) for loss in (error, harm))
    return lambda o: error(o) / least_error + harm(o) / least_harm, lambda o: o.held_error / least_error + o.held_harm / least_harm


def _held(chosen: Sequence[Offer]) -> tuple[float, float]:
    """Mean cost and error on the inputs that did not decide."""
    return sum(o.held_cost for o in chosen) / len(chosen), sum(o.held_error for o in chosen) / len(chosen)
