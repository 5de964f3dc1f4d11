"""Which offer each head takes, so that the total loss is least under one average budget."""

from __future__ import annotations

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
