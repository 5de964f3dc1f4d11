"""The published methods, the default and an oracle as recipes: at one budget, whatever the length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import presets
from ..errors import require
from ..supports import TopK

DEFAULT, PUBLISHED = "default", "scatterbrain as published"
BOTH_WAYS = {
    DEFAULT: "default",
    PUBLISHED: "scatterbrain",
    "naive sum": "naive_sum",
    "SMYRF": "smyrf",
    "Reformer": "reformer",
    "Performer": "performer",
    "Linformer": "linformer",
    "Nystromformer": "nystromformer",
    "local window": "local",
    "Sparse Transformer": "sparse_transformer",
    "Longformer": "longformer",
    "BigBird": "bigbird",
    "Routing Transformer": "routing_transformer",
    "Long-Short": "long_short",
    "Linear Transformer": "linear_transformer",
    "top-k (oracle)": "topk",
}


@dataclass(frozen=True)
class Named:
    """One method for every head. Causal, a row's mean share of what it sees is spent, and LSH takes Reformer's scheme, which can be causal."""

    name: str
    budget: float

    def __post_init__(self) -> None:
        require(self.name in BOTH_WAYS, "method", f"be one of {', '.join(BOTH_WAYS)}", self.name, "pick some of them")

    def method(self, length: int, causal: bool) -> dict[str, Any]:
        seen = (length + 1) // 2 if causal else length
        entries, preset = max(1, round(self.budget * seen)), BOTH_WAYS[self.name]
        if preset == "topk":
            return {"support": TopK(entries), "low_rank": None}
        if preset == "default":
            return presets.default(entries, length=length, causal=causal)
        if preset == "linear_transformer":
            return presets.linear_transformer()
        if preset == "scatterbrain":
            return presets.scatterbrain(entries, sparse="reformer" if causal else "smyrf")
        more = {"length": length} if preset in ("sparse_transformer", "routing_transformer") else {}
        return getattr(presets, preset)(entries, **more)

    def refusal(self, causal: bool) -> str:
        """Why it cannot be causal; empty where it can."""
        parts = [part for part in self.method(512, causal).values() if hasattr(part, "causal_refusal")]
        return next((why for part in parts if (why := part.causal_refusal())), "") if causal else ""
