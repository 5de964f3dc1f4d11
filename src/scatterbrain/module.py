"""The layer: projections around `attention`, with its random parts drawn once and kept in the state dict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .config import LowRankMap, Sampled, Support
from .errors import require, require_int
from .functional import attention, check_impl
from .problem import DEFAULT, check_method, is_default


class ScatterbrainAttention(nn.Module):
    """Multi-head attention with nn.MultiheadAttention's arguments, inputs and parameters where they make sense.

    Differences: batch_first is True by default, attention weights are returned only by impl="reference", and masks
    must say the same to every query (key padding) or be causal (is_causal). `support`, `low_rank`, `budget` are
    those of `scatterbrain.attention`; random features and rotations are sampled here, from `generator` if given,
    saved with the module, and redrawn only by `redraw()`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        support: Any = DEFAULT,
        low_rank: Any = DEFAULT,
        budget: float | None = None,
        double_count: bool = False,
        num_kv_heads: int | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        impl: str = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        require_int(embed_dim, "embed_dim")
        require_int(num_heads, "num_heads")
        require(embed_dim % num_heads == 0, "embed_dim", f"be a multiple of num_heads={num_heads}", embed_dim, "change one of them")
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        require_int(kv_heads, "num_kv_heads")
        require(num_heads % kv_heads == 0, "num_kv_heads", f"divide num_heads={num_heads}", kv_heads, "pass a divisor")
        require(0 <= dropout <= 1, "dropout", "lie in [0, 1]", dropout, "pass 0.0 for none")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.dropout, self.batch_first, self.is_causal, self.scale, self.impl = dropout, batch_first, is_causal, scale, impl
        self.budget, self.double_count = budget, double_count
        check_impl(impl, False)
        check_method(support, low_rank, budget, double_count, is_causal)
        make = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, embed_dim, **make)
        self.k_proj = nn.Linear(kdim or embed_dim, kv_heads * self.head_dim, **make)
        self.v_proj = nn.Linear(vdim or embed_dim, kv_heads * self.head_dim, **make)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **make)
        self._configs: dict[str, Any] = {}
        for name, part in (("support", support), ("low_rank", low_rank)):
            self._adopt(name, part, generator, device)
        self.reset_parameters()

    def _adopt(self, name: str, part: Any, generator: torch.Generator | None, device: Any) -> None:
        if part is None or is_default(part):
            self._configs[name] = part
            return
        sampled = part if isinstance(part, Sampled) else part.sample(self.head_dim, generator)
        self._configs[name] = sampled.config
        for key, tensor in sampled.state.items():
            tensor = tensor.detach().clone().to(device)
            if key in getattr(sampled.config, "learned", ()):
                self.register_parameter(f"{name}_{key}", nn.Parameter(tensor))
            else:
                self.register_buffer(f"{name}_{key}", tensor)

    def reset_parameters(self) -> None:
        for proj in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(proj.weight)
            if proj.bias is not None:
                nn.init.zeros_(proj.bias)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw the random parts anew, from `generator` or from torch's global one."""
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        for name, config in self._configs.items():
            if isinstance(config, (Support, LowRankMap)):
                for key, tensor in config.sample(self.head_dim, generator).state.items():
                    getattr(self, f"{name}_{key}").copy_(tensor)

    def _part(self, name: str) -> Any:
        config = self._configs[name]
        if not isinstance(config, (Support, LowRankMap)):
            return config
        head = f"{name}_"
        tensors = [*self.named_buffers(recurse=False), *self.named_parameters(recurse=False)]
        return Sampled(config, {key[len(head) :]: t for key, t in tensors if key.startswith(head)})

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, N, embed_dim) -> the same, and None or the weights. key and value default to query.

        key_padding_mask (B, M), bool: True marks padding, as in nn.MultiheadAttention.
        """
        key = query if key is None else key
        value = key if value is None else value
        unbatched = query.dim() == 2
        if unbatched:
            query, key, value = (t[None] for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        require(query.dim() == 3, "query", "have 2 or 3 dimensions", tuple(query.shape), "pass (batch, length, embed_dim)")
        out, weights = self._attend(query, key, value, self._mask(key_padding_mask, attn_mask, query, key), need_weights, is_causal)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if unbatched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, need_weights: bool, is_causal: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        q = self.q_proj(query).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.k_proj(key).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(value).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        result = attention(
            q,
            k,
            v,
            mask,
            self.dropout if self.training else 0.0,
            self.is_causal if is_causal is None else is_causal,
            self.scale,
            self.num_kv_heads != self.num_heads,
            support=self._part("support"),
            low_rank=self._part("low_rank"),
            budget=self.budget,
            double_count=self.double_count,
            impl=self.impl,
            return_weights=need_weights,
        )
        out, weights = result if need_weights else (result, None)
        return self.out_proj(out.transpose(1, 2).flatten(2).to(self.out_proj.weight.dtype)), weights

    @staticmethod
    def _mask(padding: Tensor | None, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        if padding is not None:
            name, shape = "key_padding_mask", (key.shape[0], key.shape[1])
            require(tuple(padding.shape) == shape, name, f"be (batch, keys) = {shape}", tuple(padding.shape), "pass one flag a key")
            require(padding.dtype == torch.bool, name, "be bool, True marking padding", padding.dtype, "compare it first, as in mask == 0")
            require(mask is None, "attn_mask", "be left out with key_padding_mask", "both", "join them into key_padding_mask")
            return ~padding[:, None, None, :]
        if mask is None:
            return None
        require(mask.dtype != torch.bool, "attn_mask", "be left out or float (0 visible, -inf hidden)", "bool", "pass key_padding_mask instead")
        return mask[:, None] if mask.dim() == 3 else mask

    def extra_repr(self) -> str:
        parts = ", ".join(f"{name}={config!r}" for name, config in self._configs.items())
        return f"{self.embed_dim}, {self.num_heads}, {parts}, budget={self.budget}, is_causal={self.is_causal}"
