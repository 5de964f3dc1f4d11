"""`convert` and `restore`: a model's attention answered by a plan, and the model exactly as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..calibration.plan import Plan
from ..calibration.recipe import Recipe
from ..errors import require
from ..functional import check_impl
from ..problem import DEFAULT, check_method, is_default
from . import huggingface, sdpa
from .call import Handler
from .heads import FALLBACKS, Converted, HasMethod

RECORD = "_scatterbrain_conversion"
PlanLike = Plan | HasMethod | str | Path | None


@dataclass
class Conversion:
    """What was done to a model, in names and plain values, so that it holds for a copy of the model too."""

    changed: dict[str, Any]
    handlers: dict[str, Converted]


def convert(
    model: nn.Module,
    plan: PlanLike = None,
    *,
    budget: float | None = None,
    support: Any = DEFAULT,
    low_rank: Any = DEFAULT,
    fallback: str = "raise",
    impl: str = "auto",
) -> nn.Module:
    """The same model, in place, its attention computed by `plan` (a Plan or its file), or by one method for every head.

    Weights, state dict and outputs' shapes stay. One query a call (decoding) and causal chunks after cached keys are
    exact. `fallback` says what happens to calls that linear attention cannot honour (masks that differ between
    queries, biases): "raise" or "exact"; `scatterbrain.integrations.calls(model)` counts both kinds.
    """
    require(RECORD not in model.__dict__, "model", "not be converted already", type(model).__name__, "call sb.restore(model) first")
    require(fallback in FALLBACKS, "fallback", f"be one of {', '.join(map(repr, FALLBACKS))}", fallback, "pick one of them")
    check_impl(impl, False)
    found = layers_of(model)
    recipes = recipes_for(plan, budget, support, low_rank)
    if isinstance(recipes, Plan):
        recipes.check(model, found)
        handlers = {name: Converted(name, layer.recipes, fallback, impl) for name, layer in recipes.layers.items()}
    else:
        handlers = {name: Converted(name, (recipes,), fallback, impl) for name in found}
    model.__dict__[RECORD] = Conversion(attach(model, dict(handlers)), handlers)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `convert`: forward functions, configuration and hooks as they were. The weights never changed."""
    record = model.__dict__.pop(RECORD, None)
    require(record is not None, "model", "be converted", type(model).__name__, "call sb.convert(model, ...) first")
    detach(model, record.changed)
    return model


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[Conversion | None]:
    """A block in which a converted model computes its own attention; gives what it was converted with, None where it was not."""
    record = model.__dict__.pop(RECORD, None)
    if record is not None:
        detach(model, record.changed)
    try:
        yield record
    finally:
        if record is not None:
            record.changed = attach(model, dict(record.handlers))
            model.__dict__[RECORD] = record


def calls(model: nn.Module) -> dict[str, dict[str, int]]:
    """How often each layer was approximated, and how often exact and why, since `convert`."""
    record = model.__dict__.get(RECORD)
    require(record is not None, "model", "be converted", type(model).__name__, "call sb.convert(model, ...) first")
    return {name: dict(handler.counts) for name, handler in record.handlers.items()}  # type: ignore[union-attr]


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Attention modules by name: those that ask transformers for their function, and those that call torch's."""
    require(isinstance(model, nn.Module), "model", "be a torch.nn.Module", type(model).__name__, "pass the model itself")
    found = sdpa.find(model) | huggingface.find(model)
    remedy = "run it inside sb.replace_sdpa(...), which sees every call"
    require(found, "model", "hold modules that call scaled_dot_product_attention", f"{type(model).__name__} without one", remedy)
    return {name: module for name, module in model.named_modules() if name in found}


def attach(model: nn.Module, handlers: dict[str, Handler]) -> dict[str, Any]:
    """Let the named modules' calls be answered; returns what `detach` needs, in plain values."""
    theirs = huggingface.find(model)
    asking = {name: handler for name, handler in handlers.items() if name in theirs}
    calling = {name: handler for name, handler in handlers.items() if name not in theirs}
    changed: dict[str, Any] = {"sdpa": sdpa.attach(model, calling)}
    return changed | ({"transformers": huggingface.attach(model, asking)} if asking else {})


def detach(model: nn.Module, changed: dict[str, Any]) -> None:
    sdpa.detach(model, changed["sdpa"])
    if "transformers" in changed:
        huggingface.detach(model, changed["transformers"])


def recipes_for(plan: PlanLike, budget: float | None, support: Any, low_rank: Any) -> Plan | HasMethod:
    """What the arguments of `convert` and `replace_sdpa` name: a plan, or one recipe for every head."""
    parts = not (is_default(support) and is_default(low_rank))
    given = [name for name, is_set in (("plan", plan is not None), ("budget", budget is not None), ("support or low_rank", parts)) if is_set]
    require(len(given) <= 1, "plan, budget and support", "not be combined", " and ".join(given), "pass one of them")
    if plan is not None:
        found = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
        known = isinstance(found, Plan) or callable(getattr(found, "method", None))
        require(known, "plan", "be a Plan, a Recipe, or a plan's file", type(found).__name__, "pass what sb.calibrate returned")
        return found
    check_method(support, low_rank, budget, False, False)
    if parts:
        return Recipe.fixed(None if is_default(support) else support, None if is_default(low_rank) else low_rank)
    return Recipe.default(1 / 8 if budget is None else budget)
