"""Local attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from ..config import Support
from ..context import Context
from ..errors import require_int
from ..selection import Band, Layer


@dataclass(frozen=True)
class Window(Support):
    """Symmetric: size // 2 keys on each side and the key itself. Causal: the key itself and the size - 1 before.

    With N != M positions are compared as they are, as `is_causal` does in PyTorch. `dilation` spaces the keys.
    """

    size: int
    _: KW_ONLY
    dilation: int = 1

    def __post_init__(self) -> None:
        require_int(self.size, "size")
        require_int(self.dilation, "dilation")

    def select(self, ctx: Context, state: Mapping[str, Tensor]) -> tuple[Layer, ...]:
        if ctx.causal:
            return (Band(-(self.size - 1), 0, self.dilation),)
        return (Band(-(self.size // 2), self.size // 2, self.dilation),)

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        return min(m, self.size if causal else 2 * (self.size // 2) + 1)
