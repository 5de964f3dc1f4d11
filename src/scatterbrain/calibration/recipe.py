"""How one head is computed, at any length."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .. import presets
from ..config import LowRankMap, Support
from ..errors import require
from ..names import from_dict

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A share of the entries to spend, or explicit parts. No tensors; JSON by `to_dict`."""

    budget: float
    support: Support | None = None
    low_rank: LowRankMap | None = None

    def __post_init__(self) -> None:
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
        return presets.default(max(1, round(self.budget * seen)), length=max(1, length), causal=causal)

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
