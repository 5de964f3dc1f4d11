"""Which offer each head takes, so that the total loss is least under one average budget."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .recipe import Recipe


@dataclass(frozen=True)
class Offer:
    """A recipe with its threshold: the share of entries it spends, its error and its harm to the model's output (0 where that is not
    known), on the inputs that thresholds come from, and on others; and the attention's mass on the clusters it visits."""

    recipe: Recipe
    cost: float
    error: float
    entries: float
    held_cost: float
    held_error: float
    harm: float = 0.0
    held_harm: float = 0.0
    mass: float = float("nan")


Loss = Callable[[Offer], float]


def error_loss(offer: Offer) -> float:
    return offer.error


def hull(offers: Sequence[Offer], loss: Loss = error_loss) -> list[Offer]:
    """The lower convex hull, from the cheapest on: each next one buys less a unit."""
    best: list[Offer] = []
    for offer in sorted(offers, key=lambda o: (o.cost, loss(o))):
        if best and loss(offer) >= loss(best[-1]):
            continue
        while len(best) > 1 and _slope(best[-2], best[-1], loss) > _slope(best[-2], offer, loss):
            best.pop()
        best.append(offer)
    return best


def _slope(a: Offer, b: Offer, loss: Loss) -> float:
    return (loss(b) - loss(a)) / max(b.cost - a.cost, 1e-12)


def allocate(heads: Sequence[Sequence[Offer]], budget: float | None = None, error: float | None = None, loss: Loss = error_loss) -> list[Offer]:
    """Steps along every head's hull in the order of what they buy, until the mean cost would pass `budget`, or the mean error is
    at most `error`. For a sum over heads under a sum of costs that is the least, but for the last step."""
    hulls = [hull(offers, loss) for offers in heads]
    taken = [0] * len(hulls)
    cost, total = sum(h[0].cost for h in hulls), sum(h[0].error for h in hulls)
    steps = sorted((_slope(h[i], h[i + 1], loss), n, i + 1) for n, h in enumerate(hulls) for i in range(len(h) - 1))
    skipped: set[int] = set()
    for _, n, i in steps:
        if error is not None and total <= error * len(hulls):
            break
        now, then = hulls[n][taken[n]], hulls[n][i]
        if n in skipped:
            continue
        if budget is not None and cost + then.cost - now.cost > budget * len(hulls):
            skipped.add(n)  # its later steps buy less still
            continue
        cost, total, taken[n] = cost + then.cost - now.cost, total + then.error - now.error, i
    return [h[i] for h, i in zip(hulls, taken, strict=True)]


def uniform(heads: Sequence[Sequence[Offer]], budget: float, loss: Loss = error_loss) -> list[Offer]:
    """Every head its own best within the same budget."""
    found = []
    for offers in heads:
        within = [o for o in offers if o.cost <= budget]
        found.append(min(within, key=loss) if within else min(offers, key=lambda o: o.cost))
    return found


def price(heads: Sequence[Sequence[Offer]], budget: float, loss: Loss = error_loss) -> float:
    """What the last unit of cost buys under `budget`."""
    hulls = [hull(offers, loss) for offers in heads]
    steps = sorted((_slope(a, b, loss), b.cost - a.cost) for h in hulls for a, b in itertools.pairwise(h))
    cost = sum(h[0].cost for h in hulls)
    for slope, more in steps:
        cost += more
        if cost > budget * len(hulls):
            return -slope
    return 0.0


def few(layer: Sequence[Sequence[Offer]], kinds: int, loss: Loss, unit: float) -> list[list[Offer]]:
    """The offers of at most `kinds` recipes, whatever their thresholds, for all heads of a layer: those with the same recipe share a
    call. Recipes are added one by one, each the one that helps most where a unit of cost is worth `unit`."""
    best: list[dict[Recipe, float]] = []
    for offers in layer:
        found: dict[Recipe, float] = {}
        for o in offers:
            found[kind(o)] = min(found.get(kind(o), float("inf")), loss(o) + unit * o.cost)
        best.append(found)
    taken: list[Recipe] = []
    known = [k for k in best[0] if all(k in found for found in best)]
    for _ in range(min(kinds, len(known))):
        taken.append(min((k for k in known if k not in taken), key=lambda k: sum(min(found[t] for t in (*taken, k)) for found in best)))
    return [[o for o in offers if kind(o) in taken] for offers in layer]


def kind(offer: Offer) -> Recipe:
    """The recipe without what each head has for itself."""
    return dataclasses.replace(offer.recipe, gain=None if offer.recipe.gain is None else 0.0, budget=1.0)
