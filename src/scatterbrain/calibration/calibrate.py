"""`calibrate`: watch a model on some inputs, and plan each head."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import require
from ..integrations.convert import as_it_was
from .capture import MEMORY, Watcher, capture
from .fit import KINDS, check_objective, fit
from .plan import HeadPlan, LayerPlan, Plan
from .sensitivity import Loss, feeling

NOT_CALLED = "not called during calibration"


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    budget: float | None = None,
    *,
    error: float | None = None,
    policy: str = "measured",
    objective: str | None = None,
    loss: Loss | None = None,
    kinds: int = KINDS,
    seed: int = 0,
    memory: int = MEMORY,
    progress: bool = True,
) -> Plan:
    """Watch q, k and v of every attention layer on `batches`, and plan every head within `budget` (1/8 unless told).

    budget   mean share of the visible entries over all heads; a head may get less or more of it
    error    instead: the smallest budget that reaches this mean error
    policy   "measured" tries candidates on what was watched; "paper" is the paper's rule, by entropy; "default" the default
    objective what policy "measured" makes small: "model" (unless told, where a budget is given), the error of each head's matrix
             and what it does to the model's output, found by a backward pass a batch; "matrix", the error of the matrix alone
    loss     loss(output, batch), a scalar to measure that by, in place of the model's own output (sensitivity.py)
    kinds    different recipes in a layer at most, under policy "measured": heads that share one are computed in one call, which is
             faster; more fit a little closer
    memory   bytes that may be held of q, k and v (and of gradients); inputs beyond are left out, and the plan says how many

    A batch is a tensor, a tuple of positional arguments or a mapping of keyword ones. The model runs as it is, exactly.
    """
    require(budget is None or error is None, "budget and error", "not be given together", (budget, error), "pass one of them")
    if budget is None and error is None:
        budget = 1 / 8
    if objective is None:
        objective = "model" if error is None and policy == "measured" else "matrix"
    check_objective(objective, error, policy)
    require(loss is None or objective == "model", "loss", "come with objective='model'", f"objective={objective!r}", "leave it out")
    batches = batches if hasattr(batches, "__len__") else list(batches)
    feel = None if objective == "matrix" else loss or feeling(seed)
    with bar(len(batches), "watching", "batch", progress) as step, as_it_was(model):  # type: ignore[arg-type]
        watchers = capture(model, batches, memory, step, feel)
    captures = {name: watcher.kept for name, watcher in watchers.items() if watcher.kept}
    require(captures, "model", "make an attention call that can be approximated", _why_not(watchers), "see scatterbrain.integrations")
    given: dict[str, Any] = {"budget": budget} if error is None else {"error": error}
    with bar(len(captures), "fitting", "layer", progress) as step:
        fits = fit(captures, policy=policy, objective=objective, kinds=kinds, seed=seed, progress=lambda done, total, layer: step(), **given)
    modules = dict(model.named_modules())
    layers = {name: layer_plan(type(modules[name]).__name__, watcher, fits.get(name)) for name, watcher in watchers.items()}
    about = _about(watchers) | {"objective": objective}
    if objective == "model":
        about["harm"] = sum(head.harm for heads in fits.values() for head in heads)
    return Plan(model=type(model).__name__, layers=layers, budget=budget, error=error, policy=policy, seed=seed, about=about)


def layer_plan(kind: str, watcher: Watcher, fits: Any) -> LayerPlan:
    """What was found of a layer's heads; without that, it stays exact, for the reasons that were seen."""
    if not fits:
        return LayerPlan(kind=kind, note="; ".join(watcher.reasons) or NOT_CALLED)
    length = max(capture.k.shape[2] for capture in watcher.kept)
    heads = tuple(HeadPlan(recipe=fit.recipe, stats=stats_of(fit) | {"length": length}) for fit in fits)
    return LayerPlan(kind=kind, heads=heads, causal=watcher.kept[0].causal)


def stats_of(fit: Any) -> dict[str, Any]:
    """The plain values of a fit; what is not finite has no JSON."""
    found = {f.name: getattr(fit, f.name) for f in dataclasses.fields(fit) if f.name != "recipe"}
    plain = {name: value for name, value in found.items() if isinstance(value, (int, float, str))}
    return {name: value for name, value in plain.items() if not (isinstance(value, float) and not math.isfinite(value))}


def _about(watchers: dict[str, Watcher]) -> dict[str, Any]:
    kept = max(len(watcher.kept) for watcher in watchers.values())
    lengths = sorted({capture.q.shape[2] for watcher in watchers.values() for capture in watcher.kept})
    told: dict[str, Any] = {"inputs": kept, "lengths": lengths if len(lengths) < 9 else [lengths[0], lengths[-1]]}
    left_out = max(watcher.left_out for watcher in watchers.values())
    return told | ({"inputs left out for want of memory": left_out} if left_out else {})


def _why_not(watchers: dict[str, Watcher]) -> str:
    reasons = sorted({reason for watcher in watchers.values() for reason in watcher.reasons})
    return "; ".join(reasons) or "no call at all"


@contextmanager
def bar(total: int, what: str, unit: str, shown: bool) -> Iterator[Callable[[], Any]]:
    """A progress bar where tqdm is installed; it is a comfort, not a need."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        shown = False
    if not shown:
        yield lambda: None
        return
    with tqdm(total=total, desc=what, unit=unit, leave=False, dynamic_ncols=True) as progress:
        yield progress.update
