"""Queries, keys and values of every attention layer, watched while the model runs as it is; never a matrix of weights.

Memory: q, k and v of the inputs kept, at most `memory` bytes in all, each layer an equal share. An input is one item of
a batch. Once a layer's share is full the rest of the inputs are counted, not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import require
from ..integrations import huggingface
from ..integrations.call import Call
from ..integrations.convert import attach, detach, layers_of
from ..integrations.sdpa import SdpaMode, callers
from .measure import Capture

MEMORY = 2**30


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

    def __call__(self, call: Call) -> Tensor:
        if call.only_exact:
            self.exactly(call.only_exact)
        else:
            for item in range(call.query.shape[0]):
                self._keep(call, item)
        return call.exact()

    def exactly(self, reason: str) -> None:
        self.reasons[reason] += 1

    def _keep(self, call: Call, item: int) -> None:
        parts = [t[item : item + 1] for t in (call.query, call.key, call.value)]
        size = sum(t.numel() * t.element_size() for t in parts)
        if self.bytes + size > self.share or size > self.pool.left:
            require(self.kept, "memory", f"hold an input of layer {self.name!r}, {size:,} bytes", f"{self.share:,} a layer", "raise it or cut inputs")
            self.left_out += 1
            return
        self.bytes += size
        self.pool.left -= size
        q, k, v = (t.detach().cpu().clone(memory_format=torch.contiguous_format) for t in parts)
        mask = None if call.key_mask is None else call.key_mask[item : item + 1].detach().cpu().clone()
        self.kept.append(Capture(q=q, k=k, v=v, key_mask=mask, causal=call.causal, scale=call.scale))


def capture(model: nn.Module, batches: Iterable[Any], memory: int = MEMORY, tick: Callable[[], None] = lambda: None) -> dict[str, Watcher]:
    """Run the model on every batch, without gradients and in its own mode (train or eval), and watch each layer by name.

    A batch is a tensor, a tuple of positional arguments, or a mapping of keyword ones.
    """
    found = layers_of(model)
    share = memory // max(1, len(found))
    pool = Pool(memory)
    watchers = {name: Watcher(name, share, pool) for name in found}
    count = 0
    with watching(model, watchers, lambda name: Watcher(name, share, pool)), torch.no_grad():
        for count, batch in enumerate(batches, 1):  # noqa: B007
            feed(model, batch)
            tick()
    require(count, "batches", "hold at least one batch", "none", "pass a list of inputs; an iterator can be used up")
    return watchers


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
