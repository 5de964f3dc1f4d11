"""One layer computed by its heads' recipes: heads of the same method in one call of `attention`."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config import Config, Sampled, Union
from ..errors import message, require
from ..functional import attention
from ..presets import softmax
from ..supports import Routed
from .call import ALWAYS_EXACT, Call

BY_RECIPE, PLANNED = "by its recipe", "exact: as the plan says"
FALLBACKS = ("raise", "exact")
REMEDY = "compute such calls exactly with fallback='exact', or change the model's input"
Method = dict[str, Any]
KNOWN_LENGTHS = 64  # that a layer keeps its methods for


class HasMethod(Protocol):
    """What a Recipe is to this module: the arguments of `attention` for a length."""

    def method(self, length: int, causal: bool) -> Method: ...


@dataclass
class Converted:
    """Answers a layer's calls. `recipes`: one a query head, or a single one for all; none leaves the layer exact."""

    name: str
    recipes: tuple[HasMethod, ...]
    fallback: str = "raise"
    impl: str = "auto"
    counts: Counter[str] = field(default_factory=Counter)
    drawn: dict[Any, Sampled] = field(default_factory=dict)
    grouped: dict[Any, list[tuple[list[int], Method]]] = field(default_factory=dict)

    def __call__(self, call: Call) -> Tensor:
        reason = call.only_exact if self.recipes else PLANNED
        if not reason:
            self._count(BY_RECIPE)
            return self.attend(call)
        self.exactly(reason)
        return call.exact()

    def exactly(self, reason: str) -> None:
        """Count a call that is computed exactly, or refuse it."""
        if reason not in (*ALWAYS_EXACT, PLANNED):
            self._refuse_or_warn(reason)
        self._count(reason if reason == PLANNED else f"exact: {reason}")

    def _count(self, what: str) -> None:
        if not torch.compiler.is_compiling():
            self.counts[what] += 1

    def _refuse_or_warn(self, reason: str) -> None:
        if self.fallback != "exact":
            raise ValueError(message(f"attention of layer {self.name!r}", "be one that sparse + low-rank attention can honour", reason, REMEDY))
        if not torch.compiler.is_compiling() and not self.counts[f"exact: {reason}"]:
            warnings.warn(f"layer {self.name!r} is computed exactly, since {reason}", stacklevel=2)

    def attend(self, call: Call) -> Tensor:
        """(B, H, N, E), gradients included."""
        groups = self.groups(call)
        if len(groups) == 1:
            return self._run(call, groups[0][1], None)
        parts = [self._run(call, method, heads) for heads, method in groups]
        order = torch.tensor([h for heads, _ in groups for h in heads], device=call.query.device)
        return torch.cat(parts, 1).index_select(1, order.argsort())

    def groups(self, call: Call) -> list[tuple[list[int], Method]]:
        """Heads that can share a call of attention, for as many keys as the longest of the batch shows."""
        heads, length = call.query.shape[1], call.key.shape[2]
        if torch.compiler.is_compiling():
            return group_heads(self.methods(heads, length, call.causal))
        if call.key_mask is not None:
            length = max(1, int(call.key_mask.sum(-1).max()))
        key = heads, length, call.causal
        if key not in self.grouped:
            if len(self.grouped) >= KNOWN_LENGTHS:
                self.grouped.clear()
            self.grouped[key] = group_heads(self.methods(*key))
        return self.grouped[key]

    def methods(self, heads: int, length: int, causal: bool) -> list[Method]:
        """One a query head."""
        one = len(self.recipes) == 1
        require(one or len(self.recipes) == heads, f"plan of layer {self.name!r}", f"hold its {heads} heads", len(self.recipes), "calibrate again")
        made: dict[int, Method] = {}
        for recipe in self.recipes:
            if id(recipe) not in made:
                made[id(recipe)] = recipe.method(length, causal)
        chosen = [made[id(recipe)] for recipe in self.recipes]
        return chosen * heads if one else chosen

    def _run(self, call: Call, method: Method, heads: Sequence[int] | None) -> Tensor:
        if method == softmax() and heads is None:
            return call.exact()
        query, key, value = pick_heads(call.query, call.key, call.value, heads)
        return attention(
            query,
            key,
            value,
            call.key_mask,
            call.dropout_p,
            call.causal,
            call.scale,
            key.shape[1] != query.shape[1],
            impl=self.impl,
            **self.sampled(method, query.shape[3]),
        )

    def sampled(self, method: Method, width: int) -> Method:
        """Random parts are drawn once a layer, by their own seed."""
        return {name: self._draw(part, width) if isinstance(part, Config) else part for name, part in method.items()}

    def _draw(self, part: Config, width: int) -> Config | Sampled:
        if torch.compiler.is_compiling():  # a graph draws by itself, and its tensors must not outlive it
            return part
        key = part, width
        if key not in self.drawn:
            self.drawn[key] = part.sample(width)
        return self.drawn[key]


def group_heads(methods: Sequence[Method]) -> list[tuple[list[int], Method]]:
    """Heads that can share a call, in the order of their first, and its method: routed by thresholds, each head may have its own."""
    groups: list[tuple[list[int], Method, list[Routed]]] = []
    for head, method in enumerate(methods):
        router = _router(method)
        if router is not None and not isinstance(router.gain, float):
            router = None
        # `keys` only says what thresholds spend on the mean
        shared = method if router is None else _with_router(method, dataclasses.replace(router, gain=0.0, keys=None))
        group = next((group for group in groups if group[1] == shared), None)
        if group is None:
            groups.append(group := ([], shared, []))
        group[0].append(head)
        group[2].extend(() if router is None else (router,))
    return [(heads, _joined(shared, routers)) for heads, shared, routers in groups]


def _joined(shared: Method, routers: Sequence[Routed]) -> Method:
    if not routers:
        return shared
    gains, keys = tuple(r.gain for r in routers), [r.keys for r in routers if r.keys is not None]
    mean = round(sum(keys) / len(keys)) if keys else None
    gain: Any = gains if len(set(gains)) > 1 else gains[0]
    return _with_router(shared, dataclasses.replace(routers[0], gain=gain, keys=mean))


def _router(method: Method) -> Routed | None:
    """The routed part, where there is exactly one."""
    support = method.get("support")
    found = [part for part in (support.parts if isinstance(support, Union) else (support,)) if isinstance(part, Routed)]
    return found[0] if len(found) == 1 else None


def _with_router(method: Method, router: Routed) -> Method:
    support = method["support"]
    parts = tuple(router if isinstance(part, Routed) else part for part in support.parts) if isinstance(support, Union) else (router,)
    return {**method, "support": Union(parts) if isinstance(support, Union) else router}


def pick_heads(query: Tensor, key: Tensor, value: Tensor, heads: Sequence[int] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Some query heads with the key heads they read. Key heads stay shared where the chosen heads share them evenly."""
    if heads is None:
        return query, key, value
    share = query.shape[1] // key.shape[1]
    read = [h // share for h in heads]
    distinct = sorted(set(read))
    each = len(heads) // len(distinct)
    even = read == [h for h in distinct for _ in range(each)]
    return _take(query, heads), *(_take(t, distinct if even else read) for t in (key, value))  # type: ignore[return-value]


def _take(t: Tensor, heads: Sequence[int]) -> Tensor:
    """A view where the heads are neighbours."""
    first, last = heads[0], heads[-1]
    if list(heads) == list(range(first, last + 1)):
        return t[:, first : last + 1]
    return t.index_select(1, torch.tensor(heads, device=t.device))
