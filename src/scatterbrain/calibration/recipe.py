"""How one head is computed, at any length."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from .. import presets
from ..config import LowRankMap, Support, Union
from ..errors import require, require_int
from ..features import ClusterMeans
from ..names import from_dict
from ..supports import Columns, Routed, Window

VERSION = 1
SINKS = 4
TOP, TOP_CAUSAL = 32, 12  # clusters that a query may visit at most
VISITED = 192  # keys, causal, where clusters are small: up to TOP of them


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A share of the entries to spend, and how; or explicit parts. No tensors; JSON by `to_dict`.

    With `means` given: clusters fitted to queries. means, columns and window are shares of the keys that a query sees, so
    that they grow with the length; clusters are visited by `gain`, fitted at `length` (longer rows have smaller shares: it
    falls with the log of the length). Causal: `per_chunk` clusters of each `chunk` keys take the place of `means`.
    """

    budget: float
    support: Support | None = None
    low_rank: LowRankMap | None = None
    means: float | None = None
    columns: float = 0.0
    window: float = 0.0
    gain: float | None = None
    length: int = 1
    chunk: int = 64
    per_chunk: int = 2
    inner: int = 8

    def __post_init__(self) -> None:
        for name in ("length", "chunk", "per_chunk", "inner"):
            require_int(getattr(self, name), name)
        for name in ("means", "columns", "window"):
            value = getattr(self, name)
            inside = value is None or (isinstance(value, (int, float)) and 0 <= value <= 1)
            require(inside, name, "lie in [0, 1]", value, "pass a share of the keys")
        ok = isinstance(self.budget, (int, float)) and not isinstance(self.budget, bool) and 0 < self.budget <= 1
        require(ok, "budget", "lie in (0, 1]", self.budget, "pass the share of entries to spend, such as 1/8")

    @classmethod
    def default(cls, budget: float) -> Recipe:
        """The library's default method at a budget."""
        return cls(budget=budget)

    @classmethod
    def fixed(cls, support: Support | None, low_rank: LowRankMap | None, budget: float = 1.0) -> Recipe:
        """These parts as they are, whatever the length; `budget` is only what is said of them."""
        something = support is not None or low_rank is not None
        require(something, "support and low_rank", "not both be None", "None and None", "pass one of them, or Recipe.default(1/8)")
        return cls(budget=budget, support=support, low_rank=low_rank)

    @property
    def explicit(self) -> bool:
        return self.support is not None or self.low_rank is not None

    def method(self, length: int, causal: bool) -> dict[str, Any]:
        """The arguments `support` and `low_rank` of `scatterbrain.attention` for `length` keys."""
        if self.explicit:
            return {"support": self.support, "low_rank": self.low_rank}
        if self.budget >= 1:
            return presets.softmax()
        seen = (length + 1) // 2 if causal else length
        if self.means is not None:
            return self._fitted(length, seen, causal)
        return presets.default(max(1, round(self.budget * seen)), length=max(1, length), causal=causal)

    def _fitted(self, length: int, seen: int, causal: bool) -> dict[str, Any]:
        means = max(1, min(length, round(self.means * seen))) if self.means else 1
        chunks: dict[str, Any] = {"chunk": self.chunk, "per_chunk": self.per_chunk, "fit": "queries"}
        clusters = 1 if causal else means  # whatever does not count stays out of comparisons
        parts: list[Support] = []
        if self.gain is not None:
            small = min(TOP, VISITED * self.per_chunk // self.chunk)
            top = max(TOP_CAUSAL, small) if causal else min(TOP, means)
            gain = round(self.gain - math.log(max(1, length) / self.length), 4)
            parts.append(Routed(top, clusters=max(top, clusters), gain=gain, keys=max(1, round(self._routed() * seen)), **chunks))
        columns = round(self.columns * seen)
        if columns:
            sinks = min(SINKS, columns) if causal else 0
            parts.append(Columns(columns - sinks, first=sinks))
        # a key alone stands for itself in the causal means
        window = round(self.window * seen)
        if window > (self.inner if causal else 1) or not parts:
            parts.append(Window(max(1, window)))
        support = parts[0] if len(parts) == 1 else Union(tuple(parts))
        return {"support": support, "low_rank": ClusterMeans(clusters, inner=self.inner, **chunks)}

    def _routed(self) -> float:
        """The share of the keys that is left for routed clusters, by name only: the gain decides."""
        return max(0.0, self.budget - (self.means or 0.0) - self.columns - self.window)

    def to_dict(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        parts = {name: None if fields[name] is None else fields[name].to_dict() for name in ("support", "low_rank")}
        return {"type": "Recipe", "version": VERSION, **fields, **parts}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recipe:
        require(data.get("type") == "Recipe", "type", "be Recipe", data.get("type"), "check the file")
        require(data.get("version") == VERSION, "version", f"be {VERSION}", data.get("version"), "save the recipe again with this version")
        given = {name: value for name, value in data.items() if name not in ("type", "version")}
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(given) - known)
        require(not unknown, "Recipe", f"have only the fields {', '.join(sorted(known))}", unknown, "drop the others")
        for name in ("support", "low_rank"):
            if given.get(name) is not None:
                given[name] = from_dict(given[name])
        return cls(**given)
