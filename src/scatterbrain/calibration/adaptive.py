"""Calibration during training: look again every so many steps, move the shares, and keep a log of what moved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import require, require_int
from ..integrations.convert import RECORD, as_it_was, convert, restore
from .calibrate import layer_plan
from .capture import Watcher, capture
from .fit import check_objective, fit
from .measure import Capture, HeadFit
from .plan import Plan as WholePlan
from .sensitivity import feeling

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
    """Call `step()` after every optimiser step. Every `every` of them, the first included, it looks again; `log` says what moved.
    `Adaptive.on(model, batches, budget)` watches a model and converts it. For anything else `watch()` must return captures of the
    model as it is now (with their `pull` for objective="model"), and `apply(plan)` gives the model its new recipes. A head keeps its
    recipe while its share would move by less than `least`, so that a model in training is not disturbed for nothing."""

    def __init__(
        self,
        watch: Callable[[], Mapping[str, Sequence[Capture]]],
        apply: Callable[[Plan], None],
        budget: float,
        *,
        every: int = 500,
        policy: str = "measured",
        objective: str = "matrix",
        least: float = 0.0,
        seed: int = 0,
    ) -> None:
        require_int(every, "every")
        require(least >= 0, "least", "be at least 0", least, "pass a share of the entries, such as 0.01")
        self.watch, self.apply, self.budget = watch, apply, budget
        check_objective(objective, None, policy)
        self.every, self.policy, self.objective, self.least, self.seed = every, policy, objective, least, seed
        self.plan: Plan = {}
        self.log: list[Movement] = []
        self.steps = 0

    @classmethod
    def on(cls, model: nn.Module, batches: Iterable[Any] | Callable[[], Iterable[Any]], budget: float = 1 / 8, **more: Any) -> Adaptive:
        """Look at a model on `batches` (or on what a function of that name gives each time), exactly and in its own mode, and convert
        it by what was found, anew each time. `more` as for `Adaptive`; objective="model" costs a backward pass a batch."""
        feel = feeling(more.get("seed", 0)) if more.get("objective") == "model" else None
        watchers: dict[str, Watcher] = {}

        def watch() -> dict[str, list[Capture]]:
            with as_it_was(model):
                watchers.update(capture(model, batches() if callable(batches) else batches, feel=feel))
            require(any(w.kept for w in watchers.values()), "model", "make an attention call that can be approximated", "none", "see calibrate")
            return {name: watcher.kept for name, watcher in watchers.items() if watcher.kept}

        def apply(found: Plan) -> None:
            modules = dict(model.named_modules())
            layers = {name: layer_plan(type(modules[name]).__name__, watcher, found.get(name)) for name, watcher in watchers.items()}
            watchers.clear()  # and what they hold
            how: dict[str, Any] = {}
            if RECORD in model.__dict__:  # as it was converted before
                one = next(iter(model.__dict__[RECORD].handlers.values()))
                how = {"fallback": one.fallback, "impl": one.impl}
                restore(model)
            convert(model, WholePlan(model=type(model).__name__, layers=layers, budget=budget), **how)

        return cls(watch, apply, budget, **more)

    def step(self) -> Movement | None:
        """What moved, where this step looked."""
        self.steps += 1
        if (self.steps - 1) % self.every:
            return None
        found = fit(self.watch(), self.budget, policy=self.policy, objective=self.objective, seed=self.seed)
        plan = {name: [self._keep(name, n, head) for n, head in enumerate(heads)] for name, heads in found.items()}
        self.log.append(self._movement(plan))
        self.plan = plan
        self.apply(plan)
        return self.log[-1]

    def _keep(self, layer: str, head: int, new: HeadFit) -> HeadFit:
        old = self._old(layer, head)
        if old is None or abs(old.budget - new.budget) >= self.least:
            return new
        return old  # with what was measured of it then

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
