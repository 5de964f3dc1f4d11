"""What a user writes down: frozen descriptions without tensors, and the random numbers drawn for them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .errors import require
from .random import gaussian

if TYPE_CHECKING:
    from .context import Context
    from .lowrank import LowRank
    from .selection import Layer

VERSION = 1


@dataclass(frozen=True)
class Config:
    """Base of every support and every low-rank map."""

    not_causal: ClassVar[str] = ""  # why is_causal=True is refused; empty when it is honoured

    def draw(self, head_dim: int, draw: Draw) -> dict[str, Tensor]:
        """The random tensors this method needs, float32, for heads of width `head_dim`."""
        return {}

    def sample(self, head_dim: int, generator: torch.Generator | None = None) -> Sampled:
        """Draw once; the result is fixed. Without a generator the config's own seed decides."""
        return Sampled(self, self.draw(head_dim, Draw(getattr(self, "seed", 0), generator)))

    def causal_refusal(self) -> str:
        return self.not_causal

    def to_dict(self) -> dict[str, Any]:
        fields = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {"type": type(self).__name__, "version": VERSION, **fields}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())


class Support(Config):
    """Who sees whom exactly. `A | B` is the union."""

    def select(self, ctx: Context, state: Mapping[str, Tensor]) -> tuple[Layer, ...]:
        raise NotImplementedError

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        """Nominal entries per query row, before overlaps are taken out."""
        raise NotImplementedError

    def __or__(self, other: Support) -> Union:
        require(isinstance(other, Support), "support", "be a support", other, "unite supports with supports, as in Window(64) | GlobalTokens(4)")
        return Union((*_parts(self), *_parts(other)))


class LowRankMap(Config):
    """The estimate used off the support."""

    def factor(self, ctx: Context, state: Mapping[str, Tensor]) -> LowRank:
        raise NotImplementedError

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        """Entries per query row by DESIGN's count: 2m for m features, m for m means."""
        raise NotImplementedError

    def width(self, dim: int) -> int:
        """Features a row, 0 for means: what must be held per query and key."""
        return 0

    @property
    def signed(self) -> bool:
        """Whether weights can be negative."""
        return False


@dataclass(frozen=True)
class Union(Support):
    """Pairs that any part selects; a pair that several select counts once."""

    parts: tuple[Support, ...]

    def __post_init__(self) -> None:
        ok = isinstance(self.parts, tuple) and all(isinstance(p, Support) for p in self.parts) and self.parts
        require(ok, "parts", "be a non-empty tuple of supports", self.parts, "write A | B")

    def draw(self, head_dim: int, draw: Draw) -> dict[str, Tensor]:
        state = {}
        for n, part in enumerate(self.parts):
            child = Draw(getattr(part, "seed", 0), draw.generator)
            state.update({f"{n}_{name}": t for name, t in part.draw(head_dim, child).items()})
        return state

    def causal_refusal(self) -> str:
        for part in self.parts:  # a loop: torch.compile cannot trace the generator that would say the same
            if part.causal_refusal():
                return part.causal_refusal()
        return ""

    def select(self, ctx: Context, state: Mapping[str, Tensor]) -> tuple[Layer, ...]:
        layers: list[Layer] = []
        for n, part in enumerate(self.parts):
            own = {name.split("_", 1)[1]: t for name, t in state.items() if name.startswith(f"{n}_")}
            layers += part.select(ctx, own)
        return tuple(layers)

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        return sum(p.entries(n, m, dim, causal) for p in self.parts)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


@dataclass(frozen=True)
class Sampled:
    """A config with the random tensors drawn for it. Nothing redraws them but a new `sample`."""

    config: Config
    state: Mapping[str, Tensor]

    def to(self, device: torch.device, dtype: torch.dtype) -> Sampled:
        return Sampled(self.config, {k: t.to(device, dtype) for k, t in self.state.items()})


@dataclass(frozen=True)
class Draw:
    """Source of normal and uniform numbers: a generator if one is given, else a seed."""

    seed: int
    generator: torch.Generator | None

    def normal(self, *shape: int, stream: int = 0) -> Tensor:
        if self.generator is not None:
            return torch.randn(*shape, generator=self.generator, device=self.generator.device)
        return gaussian(list(shape), self.seed, stream)

    def rotations(self, count: int, dim: int, stream: int = 0) -> Tensor:
        """(count, dim, dim) orthogonal matrices, Haar distributed."""
        q, r = torch.linalg.qr(self.normal(count, dim, dim, stream=stream))
        return q * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1))[:, None, :]


def _parts(support: Support) -> Iterator[Support]:
    return iter(support.parts) if isinstance(support, Union) else iter((support,))


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value
