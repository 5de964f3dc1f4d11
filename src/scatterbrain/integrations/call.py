"""What a model asks of one attention layer, in one form, whatever library it is written with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

DECODE = "one query a call (decoding)"
PREFIX = "a causal chunk after cached keys"
ALWAYS_EXACT = (DECODE, PREFIX)  # by design, without being asked; everything else is refused unless fallback="exact"


@dataclass(frozen=True)
class Call:
    """query (B, H, N, D), key (B, H', M, D), value (B, H', M, E); key_mask (B, 1, 1, M) or None.

    `only_exact` says why linear attention cannot honour what is asked, and is empty where it can. `exact` computes
    what the model would have computed, (B, H, N, E).
    """

    layer: str
    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    causal: bool
    scale: float | None
    dropout_p: float
    only_exact: str
    exact: Callable[[], Tensor]


class Handler(Protocol):
    """Answers the calls of one layer."""

    def __call__(self, call: Call) -> Tensor: ...

    def exactly(self, reason: str) -> None:
        """Hear of a call that the model computes itself, for this reason, or refuse it."""
