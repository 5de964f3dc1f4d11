"""Queries, keys and values of every attention layer, watched while the model runs as it is; never a matrix of weights.

Memory: q, k and v of the inputs kept, and their gradients where those are asked for, at most `memory` bytes in all, each layer an
equal share; and, with gradients, the activations of one batch while it is looked at. An input is one item of
a batch. Once a layer's share is full the rest of the inputs are counted, not kept.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import message, require
from ..integrations import huggingface
from ..integrations.call import Call
from ..integrations.convert import attach, detach, layers_of
from ..integrations.sdpa import SdpaMode, callers
from .measure import Capture

MEMORY = 2**31
NO_GRADIENT = "pass objective='matrix', which needs no gradient"


@dataclass
class Pool:
    """Bytes that all layers together may still take."""

    left: int


@dataclass
class Watcher:
    """Answers a layer's calls exactly, as the model would, and keeps what they were about."""

    name: str
    share: int
    pool: Pool
    kept: list[Capture] = field(default_factory=list)
    bytes: int = 0
    left_out: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    feels: bool = False
    waiting: list[tuple[Tensor, int, int]] = field(default_factory=list)

    def __call__(self, call: Call) -> Tensor:
        out = call.exact()
        if self.feels:  # a zero whose gradient is the output's
            zero = torch.zeros_like(out, requires_grad=True)
            out = out + zero
        if call.only_exact:
            self.exactly(call.only_exact)
        else:
            for item in range(call.query.shape[0]):
                if self._keep(call, item) and self.feels:
                    self.waiting.append((zero, item, len(self.kept) - 1))
        return out

    def feel(self, gradient: dict[int, Tensor]) -> None:
        """Give what was kept the gradients of its outputs, by the id of their zeros."""
        for zero, item, place in self.waiting:
            pull = gradient[id(zero)][item : item + 1].to("cpu", torch.bfloat16, copy=True)
            finite = bool(torch.isfinite(pull).all())
            require(finite, f"gradient at layer {self.name!r}", "be finite", "NaN or infinity", f"calibrate in float32, or {NO_GRADIENT}")
            self.kept[place] = dataclasses.replace(self.kept[place], pull=pull)
        self.waiting.clear()

    def exactly(self, reason: str) -> None:
        self.reasons[reason] += 1

    def _keep(self, call: Call, item: int) -> bool:
        parts = [t[item : item + 1] for t in (call.query, call.key, call.value)]
        size = sum(t.numel() * t.element_size() for t in parts)
        if self.feels:  # the gradient of the output, as wide as the values
            size += 2 * call.query[0, ..., 0].numel() * call.value.shape[3]
        if self.bytes + size > self.share or size > self.pool.left:
            require(self.kept, "memory", f"hold an input of layer {self.name!r}, {size:,} bytes", f"{self.share:,} a layer", "raise it or cut inputs")
            self.left_out += 1
            return False
        self.bytes += size
        self.pool.left -= size
        q, k, v = (t.detach().cpu().clone(memory_format=torch.contiguous_format) for t in parts)
        mask = None if call.key_mask is None else call.key_mask[item : item + 1].detach().cpu().clone()
        self.kept.append(Capture(q=q, k=k, v=v, key_mask=mask, causal=call.causal, scale=call.scale))
        return True


def capture(
    model: nn.Module,
    batches: Iterable[Any],
    memory: int = MEMORY,
    tick: Callable[[], None] = lambda: None,
    feel: Callable[[Any, Any], Tensor] | None = None,
) -> dict[str, Watcher]:
    """Run the model on every batch, in its own mode (train or eval), and watch each layer by name.

    A batch is a tensor, a tuple of positional arguments, or a mapping of keyword ones. feel(output, batch) gives a scalar whose
    gradient by every head's output is kept too, at the cost of a backward pass a batch; without it no gradient is taken.
    """
    found = layers_of(model)
    share = memory // max(1, len(found))
    pool = Pool(memory)
    watchers = {name: Watcher(name, share, pool) for name in found}
    count = 0
    with watching(model, watchers, lambda name: Watcher(name, share, pool, feels=feel is not None)), torch.no_grad():
        for batch in batches:
            count += 1
            if feel is None:
                feed(model, batch)
            else:
                _feel(model, batch, watchers, feel)
            tick()
    felt = feel is None or any(bool(c.pull.any()) for w in watchers.values() for c in w.kept if c.pull is not None)
    require(felt or not any(w.kept for w in watchers.values()), "model", "feel its attention", "gradients that are all zero", NO_GRADIENT)
    require(count, "batches", "hold at least one batch", "none", "pass a list of inputs; an iterator can be used up")
    return watchers


def _feel(model: nn.Module, batch: Any, watchers: dict[str, Watcher], feel: Callable[[Any, Any], Tensor]) -> None:
    """The gradient of a scalar of the output by what each head gave."""
    try:
        with _held(model, watchers), torch.enable_grad():
            output = feed(model, batch)
            zeros = {id(zero): zero for watcher in watchers.values() for zero, _, _ in watcher.waiting}
            for watcher in watchers.values():
                watcher.feels = False
            found = _gradients(feel(output, batch), list(zeros.values())) if zeros else ()
    except RuntimeError as error:
        said = str(error).strip().splitlines()[0]
        raise ValueError(message("model", "be one that a gradient can be taken of", said, NO_GRADIENT)) from error
    gradient = {name: torch.zeros_like(zero) if g is None else g for (name, zero), g in zip(zeros.items(), found, strict=True)}
    for watcher in watchers.values():
        watcher.feel(gradient)


@contextmanager
def _held(model: nn.Module, watchers: dict[str, Watcher]) -> Iterator[None]:
    """Watchers feel. Parameters are held, so that only what lies after an attention output is differentiated; gradient
    checkpointing is off, since it would run the watchers again."""
    with ExitStack() as stack:
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False) is True:
                stack.callback(setattr, module, "gradient_checkpointing", True)
                setattr(module, "gradient_checkpointing", False)  # noqa: B010
        for p in model.parameters():
            if p.requires_grad:
                stack.callback(p.requires_grad_, True)
                p.requires_grad_(False)
        for watcher in watchers.values():
            watcher.feels = True
        try:
            yield
        finally:
            for watcher in watchers.values():  # those that the run found too
                watcher.feels = False


def _gradients(scalar: Any, zeros: list[Tensor]) -> tuple[Tensor | None, ...]:
    one = isinstance(scalar, Tensor) and scalar.numel() == 1
    require(one, "loss", "be a scalar", tuple(scalar.shape) if isinstance(scalar, Tensor) else type(scalar).__name__, "sum it, or take its mean")
    require(scalar.requires_grad, "model", "give an output that has a gradient", "one without", NO_GRADIENT)
    return torch.autograd.grad(scalar, zeros, allow_unused=True)


def watching(model: nn.Module, watchers: dict[str, Any], more: Callable[[str], Watcher] | None = None) -> ExitStack:
    """A context in which the model's layers answer to `watchers`.

    transformers' layers are watched where they ask for their attention; others wherever scaled_dot_product_attention is
    called, so that callers which no static search finds are seen too (and given a watcher
    by `more`, or refused).
    """
    stack, theirs = ExitStack(), huggingface.find(model)
    changed = attach(model, {name: watcher for name, watcher in watchers.items() if name in theirs})
    stack.callback(detach, model, changed)
    names = {id(module): name for name, module in model.named_modules()}

    def route() -> tuple[str, Any]:
        inner, _ = callers()
        require(id(inner) in names, "model", "call attention from its own modules", type(inner).__name__, "calibrate the model that holds it")
        name = names[id(inner)]
        if name in theirs:  # it was asked already, and this is its exact answer being computed
            return name, None
        if name not in watchers:
            require(more, "plan", "name every attention layer of the model", f"nothing for {name!r}", "calibrate this model")
            assert more is not None
            watchers[name] = more(name)
        return name, watchers[name]

    stack.enter_context(SdpaMode(route))
    return stack


def feed(model: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
