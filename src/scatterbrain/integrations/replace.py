"""`replace_sdpa`: a context in which every F.scaled_dot_product_attention is ours. Nothing is registered, no model is touched."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn

from ..calibration.plan import Plan
from ..errors import require
from ..functional import check_impl
from ..problem import DEFAULT
from .convert import PlanLike, recipes_for
from .heads import FALLBACKS, Converted
from .sdpa import SdpaMode, callers


class replace_sdpa(SdpaMode):
    """`with sb.replace_sdpa(plan): model(x)`; arguments as in `convert`.

    A call belongs to the module whose code makes it, and takes the plan's layer of that name (a plan made on a part
    of the model, or on a whole that the model is part of, is matched by the end of the name). Calls outside any
    module take the plan's layers in turn. `.calls` counts, a layer, what was approximated and what was exact and why.
    """

    def __init__(
        self,
        plan: PlanLike = None,
        *,
        budget: float | None = None,
        support: Any = DEFAULT,
        low_rank: Any = DEFAULT,
        fallback: str = "raise",
        impl: str = "auto",
    ) -> None:
        super().__init__(self.find)
        require(fallback in FALLBACKS, "fallback", f"be one of {', '.join(map(repr, FALLBACKS))}", fallback, "pick one of them")
        check_impl(impl, False)
        self.recipes = recipes_for(plan, budget, support, low_rank)
        self.fallback, self.impl = fallback, impl
        self.handlers: dict[str, Converted] = {}
        self.outside, self.fast_path = 0, True
        self.names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()

    def __enter__(self) -> replace_sdpa:
        self.fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # compiled code would take it, mode or no mode
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        torch.backends.mha.set_fastpath_enabled(self.fast_path)
        if kind is None and not self.seen:
            warnings.warn("nothing called F.scaled_dot_product_attention inside replace_sdpa, so nothing was replaced", stacklevel=2)

    @property
    def calls(self) -> dict[str, dict[str, int]]:
        return {name: dict(handler.counts) for name, handler in self.handlers.items()}

    def find(self) -> tuple[str, Converted]:
        inner, outer = callers()
        name = self.name_of(inner, outer)
        if name not in self.handlers:
            recipes = self.recipes.layers[name].recipes if isinstance(self.recipes, Plan) else (self.recipes,)
            self.handlers[name] = Converted(name, recipes, self.fallback, self.impl)
        return name, self.handlers[name]

    def name_of(self, inner: nn.Module | None, outer: nn.Module | None) -> str:
        if inner is None or outer is None:
            return self.next_outside()
        if outer not in self.names:
            self.names[outer] = {id(module): name for name, module in outer.named_modules()}
        name = self.names[outer].get(id(inner), type(inner).__name__)
        return match(name, self.recipes) if isinstance(self.recipes, Plan) else name

    def next_outside(self) -> str:
        self.outside += 1
        if not isinstance(self.recipes, Plan):
            return "(outside any module)"
        layers = list(self.recipes.layers)
        return layers[(self.outside - 1) % len(layers)]


def match(name: str, plan: Plan) -> str:
    """The plan's layer of this name, or the only one whose name ends with it or ends it."""
    if name in plan.layers:
        return name
    ends = [known for known in plan.layers if f".{name}".endswith(f".{known}") or f".{known}".endswith(f".{name}")]
    remedy = "calibrate with this model, or convert only what was calibrated"
    require(len(ends) == 1, "plan", f"hold one layer for the call in {name!r}", ends or "none", remedy)
    return ends[0]
