"""One layer computed by its heads' recipes: heads of the same method in one call of `attention`."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config import Config, Sampled
from ..errors import message, require
from ..functional import attention
from ..presets import softmax
from .call import ALWAYS_EXACT, Call

BY_RECIPE, PLANNED = "by its recipe", "exact: as the plan says"
FALLBACKS = ("raise", "exact")
REMEDY = "compute such calls exactly with fallback='exact', or change the model's input"
Method = dict[str, Any]


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
        methods = self.methods(call)
        groups = group_heads(methods)
        if len(groups) == 1:
            return self._run(call, methods[0], None)
        parts = [self._run(call, methods[heads[0]], heads) for heads in groups]
        order = torch.tensor([h for heads in groups for h in heads], device=call.query.device)
        return torch.cat(parts, 1).index_select(1, order.argsort())

    def methods(self, call: Call) -> list[Method]:
        """One a query head, for as many keys as the longest of the batch shows."""
        heads, length = call.query.shape[1], call.key.shape[2]
        if call.key_mask is not None and not torch.compiler.is_compiling():
            length = max(1, int(call.key_mask.sum(-1).max()))
        one = len(self.recipes) == 1
        require(one or len(self.recipes) == heads, f"plan of layer {self.name!r}", f"hold its {heads} heads", len(self.recipes), "calibrate again")
        made: dict[int, Method] = {}
        for recipe in self.recipes:
            if id(recipe) not in made:
                made[id(recipe)] = recipe.method(length, call.causal)
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


def group_heads(methods: Sequence[Method]) -> list[list[int]]:
    """Heads that share a method, in the order of their first."""
    groups: list[list[int]] = []
    for head, method in enumerate(methods):
        for group in groups:
            if methods[group[0]] == method:
                group.append(head)
                break
        else:
            groups.append([head])
    return groups


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
