"""`evaluate`: what a plan gives on inputs it was not made with: error a layer and head, entries, FLOPs, bytes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..explain import explain
from ..functional import attention
from ..integrations.call import Call
from ..integrations.convert import PlanLike, as_it_was, layers_of, recipes_for
from ..integrations.heads import Converted, Method, pick_heads
from .calibrate import bar
from .capture import feed, watching
from .measure import Capture, entries_of, error_of, look
from .plan import Plan, aligned, number

FORMAT = 1
SUMS = ("error", "output_error", "entropy", "entries", "visible")


@dataclass(frozen=True, kw_only=True)
class HeadReport:
    """Means over the inputs. error is of the matrix of weights, output_error of what it gives with the values, both relative
    Frobenius (1 is what predicting zero gives); entries and visible are keys a query row."""

    layer: str
    head: int
    error: float
    output_error: float
    entropy: float
    entries: float
    visible: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """`exact` counts, a layer, calls that are not approximated, and why. FLOPs and bytes are of all inputs and layers together;
    bytes are the largest of any one call, beyond its inputs, an estimate."""

    heads: tuple[HeadReport, ...]
    exact: dict[str, dict[str, int]]
    inputs: int
    flops: float
    flops_full: float
    bytes: float
    bytes_full: float

    def mean(self, name: str) -> float:
        return sum(getattr(head, name) for head in self.heads) / max(1, len(self.heads))

    @property
    def error(self) -> float:
        """Mean over heads."""
        return self.mean("error")

    @property
    def output_error(self) -> float:
        return self.mean("output_error")

    @property
    def budget(self) -> float:
        """Entries spent over entries visible, of all heads together."""
        return self.mean("entries") / max(1e-9, self.mean("visible"))

    def table(self) -> str:
        lines: list[tuple[str, ...]] = [("layer", "head", "error", "output error", "entropy", "entries", "of", "budget")]
        for head in self.heads:
            lines.append((head.layer, str(head.head), *_cells(head.error, head.output_error, head.entropy, head.entries, head.visible)))
        lines.append(("mean", "", *_cells(*(self.mean(name) for name in SUMS))))
        text = aligned(lines, right=tuple(range(1, 8)))
        text += [f"{layer}: {'; '.join(f'{n} calls {why}' for why, n in counts.items())}" for layer, counts in self.exact.items() if counts]
        text.append(f"FLOPs of attention {self.flops:.3g}, exact {self.flops_full:.3g} ({self.flops_full / max(1.0, self.flops):.2f} times)")
        text.append(f"extra bytes of a call {self.bytes / 2**20:,.1f} MiB, of the full matrix {self.bytes_full / 2**20:,.1f} MiB")
        return "\n".join(text)

    __str__ = table

    def to_dict(self) -> dict[str, Any]:
        summary = {"error": self.error, "output_error": self.output_error, "budget": self.budget}
        return {"type": "Report", "version": FORMAT, **summary, **dataclasses.asdict(self)}


@dataclass
class Meter:
    """Answers a layer's calls exactly, and measures what its recipes would have given."""

    converted: Converted
    seed: int
    sums: dict[str, Tensor] = field(default_factory=dict)
    calls: int = 0
    flops: float = 0.0
    flops_full: float = 0.0
    bytes: float = 0.0
    bytes_full: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def __call__(self, call: Call) -> Tensor:
        if call.only_exact or not self.converted.recipes:
            self.exactly(call.only_exact or "as the plan says")
            return call.exact()
        exact = call.exact()
        with torch.no_grad():
            for heads, method in self.converted.groups(call):
                self._group(call, exact, heads, method, call.query.shape[1])
        self.calls += 1
        return exact

    def exactly(self, reason: str) -> None:
        self.reasons[f"exact: {reason}"] += 1

    def _group(self, call: Call, exact: Tensor, heads: list[int], method: Method, count: int) -> None:
        q, k, v = pick_heads(call.query, call.key, call.value, heads)
        c = Capture(q=q, k=k, v=v, key_mask=call.key_mask, causal=call.causal, scale=call.scale)
        gqa = k.shape[1] != q.shape[1]
        seen = look(c, self.seed)
        spent, visible = entries_of(c, method)
        out = attention(q, k, v, call.key_mask, 0.0, call.causal, call.scale, gqa, **method)
        found = (error_of(c, seen, method), output_error(out, exact[:, heads], call.key_mask), seen.entropy, spent, visible)
        for name, value in zip(SUMS, found, strict=True):
            total = self.sums.setdefault(name, torch.zeros(count, dtype=torch.float64))
            total[heads] += value.double().view(q.shape[0], len(heads)).mean(0).cpu()
        told = explain(q, k, v, call.key_mask, 0.0, call.causal, call.scale, gqa, **method)
        self.flops, self.flops_full = self.flops + told.flops, self.flops_full + told.flops_full
        self.bytes, self.bytes_full = max(self.bytes, told.bytes), max(self.bytes_full, told.bytes_full * count / len(heads))


def evaluate(model: nn.Module, plan: PlanLike = None, batches: Iterable[Any] = (), *, seed: int = 0, progress: bool = True) -> Report:
    """Run the model exactly on `batches` and measure, at every attention call, what `plan` would give in its place.

    plan      a Plan, its file or a Recipe; None takes what a converted model was converted with
    batches   as in `calibrate`, and better not the same: a plan is fitted to what it was made with
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()  # dropout is no error of the method's
        with as_it_was(model) as record:
            return _evaluate(model, record.handlers if plan is None and record is not None else plan, batches, seed, progress)
    finally:
        for module, mode in modes:
            module.training = mode


def _evaluate(model: nn.Module, plan: Any, batches: Iterable[Any], seed: int, progress: bool) -> Report:
    found = layers_of(model)
    if isinstance(plan, dict):
        converted = plan
    else:
        recipes = recipes_for(plan, None, "default", "default")
        if isinstance(recipes, Plan):
            recipes.check(model, found)
            converted = {name: Converted(name, layer.recipes) for name, layer in recipes.layers.items()}
        else:
            converted = {name: Converted(name, (recipes,)) for name in found}
    meters = {name: Meter(one, seed) for name, one in converted.items()}
    batches = batches if hasattr(batches, "__len__") else list(batches)
    with watching(model, meters), torch.no_grad(), bar(len(batches), "measuring", "batch", progress) as step:  # type: ignore[arg-type]
        for batch in batches:
            feed(model, batch)
            step()
    heads = tuple(head for name, meter in meters.items() if meter.calls for head in _heads(name, meter))
    totals = {name: sum(getattr(meter, name) for meter in meters.values()) for name in ("flops", "flops_full")}
    peaks = {name: max((getattr(meter, name) for meter in meters.values()), default=0.0) for name in ("bytes", "bytes_full")}
    exact = {name: dict(meter.reasons) for name, meter in meters.items()}
    return Report(heads=heads, exact=exact, inputs=len(batches), **totals, **peaks)  # type: ignore[arg-type]


def _heads(name: str, meter: Meter) -> list[HeadReport]:
    means = {key: (total / meter.calls).tolist() for key, total in meter.sums.items()}
    return [HeadReport(layer=name, head=n, **{key: values[n] for key, values in means.items()}) for n in range(len(means["error"]))]


def output_error(got: Tensor, true: Tensor, key_mask: Tensor | None) -> Tensor:
    """(B, H) relative Frobenius, over the rows of real tokens."""
    gap, size = (got.double() - true.double()).square().sum(-1), true.double().square().sum(-1)
    if key_mask is not None and key_mask.shape[-1] == got.shape[2]:
        gap, size = gap * key_mask[:, :, 0], size * key_mask[:, :, 0]
    return (gap.sum(-1) / size.sum(-1).clamp(min=1e-30)).sqrt()


def _cells(error: float, out: float, entropy: float, entries: float, visible: float) -> tuple[str, ...]:
    return (number(error), number(out), number(entropy), f"{entries:,.1f}", f"{visible:,.1f}", f"{entries / max(1e-9, visible):.4f}")
