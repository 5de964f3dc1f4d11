"""Calibration during training: look again every so many steps, move the shares, and keep a log of what moved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import require, require_int
from .fit import fit
from .measure import Capture, HeadFit

Plan = dict[str, list[HeadFit]]


@dataclass(frozen=True, kw_only=True)
class Movement:
    """What one look changed. `moved` is the mean over heads of how much of the entries each gained or lost, `changed` how many
    heads have another recipe; budgets are means over the heads of each layer."""

    step: int
    error: float
    budget: float
    moved: float
    changed: int
    budgets: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Adaptive:
    """Call `step()` after every optimiser step. Every `every` of them, the first included, `watch()` must return captures of the
    model as it is now, and `apply(plan)` gives the model its new recipes. A head keeps its recipe while its share would move by
    less than `least`, so that a model in training is not disturbed for nothing."""

    def __init__(
        self,
        watch: Callable[[], Mapping[str, Sequence[Capture]]],
        apply: Callable[[Plan], None],
        budget: float,
        *,
        every: int = 500,
        policy: str = "measured",
        least: float = 0.0,
        seed: int = 0,
    ) -> None:
        require_int(every, "every")
        require(least >= 0, "least", "be at least 0", least, "pass a share of the entries, such as 0.01")
        self.watch, self.apply, self.budget = watch, apply, budget
        self.every, self.policy, self.least, self.seed = every, policy, least, seed
        self.plan: Plan = {}
        self.log: list[Movement] = []
        self.steps = 0

    def step(self) -> Movement | None:
        """What moved, where this step looked."""
        self.steps += 1
        if (self.steps - 1) % self.every:
            return None
        found = fit(self.watch(), self.budget, policy=self.policy, seed=self.seed)
        plan = {name: [self._keep(name, n, head) for n, head in enumerate(heads)] for name, heads in found.items()}
        self.log.append(self._movement(plan))
        self.plan = plan
        self.apply(plan)
        return self.log[-1]

    def _keep(self, layer: str, head: int, new: HeadFit) -> HeadFit:
        old = self._old(layer, head)
        if old is None or abs(old.budget - new.budget) >= self.least:
            return new
        return dataclasses.replace(new, recipe=old.recipe, budget=old.budget, entries=old.entries)

    def _old(self, layer: str, head: int) -> HeadFit | None:
        heads = self.plan.get(layer, [])
        return heads[head] if head < len(heads) else None

    def _movement(self, plan: Plan) -> Movement:
        pairs = [(self._old(name, n), head) for name, heads in plan.items() for n, head in enumerate(heads)]
        apart = [0.0 if old is None else abs(old.budget - new.budget) for old, new in pairs]
        return Movement(
            step=self.steps,
            error=sum(new.error for _, new in pairs) / len(pairs),
            budget=sum(new.budget for _, new in pairs) / len(pairs),
            moved=sum(apart) / len(pairs),
            changed=sum(old is None or old.recipe != new.recipe for old, new in pairs),
            budgets={name: sum(head.budget for head in heads) / len(heads) for name, heads in plan.items()},
        )
