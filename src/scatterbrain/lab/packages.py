"""Attention of other packages, each cut to its core: the layer's projections are replaced by the given q, k and v."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .contenders import Contender, Forward, Shape
from .extras import need

MODULES = (
    "performer_pytorch.performer_pytorch",
    "reformer_pytorch.reformer_pytorch",
    "nystrom_attention.nystrom_attention",
    "linear_attention_transformer.linear_attention_transformer",
    "routing_transformer.routing_transformer",
    "transformers.models.big_bird.modeling_big_bird",
    "transformers.models.longformer.modeling_longformer",
)


def merged(x: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, H D)."""
    return x.transpose(1, 2).flatten(2)


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def largest_divisor(most: int, length: int) -> int:
    return next(size for size in range(max(1, min(most, length)), 0, -1) if length % size == 0)


def performer(shape: Shape) -> Forward:
    package = need("performer_pytorch.performer_pytorch", "bench")
    torch.manual_seed(shape.seed)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints that there is no CUDA code
        layer = package.FastAttention(shape.width, nb_features=performer_features(shape), causal=shape.causal).to(getattr(torch, shape.dtype))
    forward: Forward = layer
    return forward


def performer_features(shape: Shape) -> int:
    return max(1, shape.entries // 2)


def performer_definition(shape: Shape) -> Forward:
    """Its own features, multiplied out: N x N weights, masked, divided by their sums (causal, with its eps in them)."""
    package, layer = need("performer_pytorch.performer_pytorch", "bench"), performer(shape)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        projection = layer.projection_matrix  # type: ignore[attr-defined]
        phi = package.softmax_kernel(q, projection_matrix=projection, is_query=True)
        weights = phi @ package.softmax_kernel(k, projection_matrix=projection, is_query=False).mT
        weights = weights.tril() if shape.causal else weights
        return weights @ v / (weights.sum(-1, keepdim=True) + 1e-6 * shape.causal * phi.sum(-1, keepdim=True))

    return forward


def reformer_bucket(shape: Shape) -> int:
    """A query sees its bucket and the one before; the length must be a multiple of twice the bucket."""
    return largest_divisor(max(1, shape.entries // (1 if shape.causal else 2)), shape.length // 2)


def reformer(shape: Shape) -> Forward:
    package = need("reformer_pytorch.reformer_pytorch", "bench")
    layer = package.LSHAttention(bucket_size=reformer_bucket(shape), n_hashes=1, causal=shape.causal).eval()

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(shape.seed)
        out: Tensor = layer(q.flatten(0, 1), v.flatten(0, 1))[0]
        return out.unflatten(0, q.shape[:2])

    return forward


def nystrom(shape: Shape) -> Forward:
    package, heads = need("nystrom_attention.nystrom_attention", "bench"), shape.heads
    layer = package.NystromAttention(1, shape.width, heads, num_landmarks=landmarks(shape), residual=False).eval()
    layer.to_qkv, layer.to_out = nn.Identity(), nn.Identity()
    return lambda q, k, v: split(layer(torch.cat([merged(q), merged(k), merged(v)], -1)), heads)


def landmarks(shape: Shape) -> int:
    return largest_divisor(max(1, shape.entries // 2), shape.length)


def linear(shape: Shape) -> Forward:
    package = need("linear_attention_transformer.linear_attention_transformer", "bench")
    causal, both = package.causal_linear_attn, package.linear_attn
    return lambda q, k, v: causal(q, k, v, bucket_size=blindspot(shape)) if shape.causal else both(q, k, v)


def blindspot(shape: Shape) -> int:
    """Its own default, 1, holds d x d numbers for each token; blocks hold them for each block, and do not see themselves."""
    return largest_divisor(64, shape.length)


def linear_definition(shape: Shape) -> Forward:
    """softmax(q) softmax(k, over the sequence)' / sqrt(d), multiplied out; causal, exp(k), earlier blocks and a division by the sum."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = torch.softmax(q, -1) / math.sqrt(shape.width)
        if not shape.causal:
            return q @ torch.softmax(k, -2).mT @ v
        block = torch.arange(shape.length) // blindspot(shape)
        weights = (q @ k.exp().mT).masked_fill(block[:, None] <= block, 0.0)
        return weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-3)

    return forward


def routing_window(shape: Shape) -> int:
    """Keys of a cluster; causal, the mean query may see half of them."""
    return min(shape.length, shape.entries * (2 if shape.causal else 1))


def routing(shape: Shape) -> Forward:
    package, window = need("routing_transformer.routing_transformer", "bench"), routing_window(shape)
    torch.manual_seed(shape.seed)
    layer = package.KmeansAttention(max(1, shape.length // window), window, shape.heads, shape.width, causal=shape.causal)
    layer = layer.eval().to(getattr(torch, shape.dtype))
    layer.mem_value.data.zero_()  # an untrained constant would be added to every output

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = layer(q, k, v)[0]
        return out

    return forward


def bigbird_blocks(shape: Shape) -> tuple[int, int]:
    """The size of a block and the random ones a row: with two global and three in the window, these spend the entries."""
    fits = [size for size in (8, 16, 32, 64) if size <= shape.entries // 8 and shape.length % size == 0]
    size = max(fits, default=0)
    return size, shape.entries // size - 5 if size else 0


def bigbird(shape: Shape) -> Forward:
    package, (size, random) = need("transformers.models.big_bird.modeling_big_bird", "bench"), bigbird_blocks(shape)
    config = SimpleNamespace(
        max_position_embeddings=shape.length,
        hidden_size=shape.heads * shape.width,
        num_attention_heads=shape.heads,
        num_random_blocks=random,
        block_size=size,
        use_bias=False,
    )
    # In eval mode its random blocks are all block 0. There is no dropout in this class.
    layer = package.BigBirdBlockSparseAttention(config, seed=shape.seed).train()
    mask = torch.ones(shape.batch, shape.length, dtype=getattr(torch, shape.dtype))
    blocked, band, rows, columns = package.BigBirdModel.create_masks_for_block_sparse_attn(mask, size)
    masks, n = (band, rows, columns, blocked, blocked), shape.length

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = (shape.heads, random, shape.width, size, size, shape.batch, n, n)
        more: dict[str, Any] = {"seed": shape.seed, "plan_from_length": None, "plan_num_rand_blocks": None}
        out: Tensor = layer.bigbird_block_sparse_attention(q, k, v, *masks, *sizes, **more)[0]
        return out.transpose(1, 2)

    return forward


class Given(nn.Module):
    """In the place of a projection: returns what it was told to, as a copy that the layer may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.held is not None
        return self.held.clone()


def longformer_reach(shape: Shape) -> int:
    """Keys to each side; the length must be a multiple of twice that."""
    return largest_divisor(max(1, shape.entries // 2), shape.length // 2)


def longformer(shape: Shape) -> Forward:
    package, width = need("transformers.models.longformer.modeling_longformer", "bench"), shape.heads * shape.width
    config = SimpleNamespace(
        hidden_size=width, num_attention_heads=shape.heads, attention_probs_dropout_prob=0.0, attention_window=[2 * longformer_reach(shape)]
    )
    layer = package.LongformerSelfAttention(config, 0).eval()
    layer.query, layer.key, layer.value = Given(), Given(), Given()
    none = torch.zeros(shape.batch, shape.length)
    hidden = torch.zeros(1, 1, 1).expand(shape.batch, shape.length, width)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for part, x in zip((layer.query, layer.key, layer.value), (q, k, v), strict=True):
            part.held = merged(x).transpose(0, 1)
        out: Tensor = layer(hidden, attention_mask=none, is_index_masked=none.bool(), is_global_attn=False)[0]
        return split(out, shape.heads)

    return forward


def longformer_definition(shape: Shape) -> Forward:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(shape.length)
        far = (at[:, None] - at).abs() > longformer_reach(shape)
        return torch.softmax((q @ k.mT / math.sqrt(shape.width)).masked_fill(far, -torch.inf), -1) @ v

    return forward


def both_ways(shape: Shape) -> str:
    return "the package has no causal form" if shape.causal else ""


def bigbird_refuses(shape: Shape) -> str:
    size, random = bigbird_blocks(shape)
    if shape.causal:
        return both_ways(shape)
    if not size:
        return f"no block size of it divides {shape.length:,} tokens and fits {shape.entries} entries"
    few = shape.length // size < 5 + 2 * random
    return f"{shape.length:,} tokens are fewer blocks of {size} than its random plan needs" if few else ""


CORE = "the core alone: q, k, v given in place of the projections"
PACKAGES = (
    Contender(
        name="performer-pytorch",
        label="performer-pytorch",
        kind="package",
        module="performer_pytorch",
        build=performer,
        definition=performer_definition,
        entries=lambda s: 2.0 * performer_features(s),
        note="FastAttention, features drawn once, before the clock",
    ),
    Contender(
        name="reformer-pytorch",
        label="reformer-pytorch",
        kind="package",
        module="reformer_pytorch",
        build=reformer,
        entries=lambda s: reformer_bucket(s) * (1.0 if s.causal else 2.0),
        note="LSHAttention, one round; it makes the keys from the queries, so it has no error against attention between q and k",
        compared=False,
    ),
    Contender(
        name="nystrom-attention",
        label="nystrom-attention",
        kind="package",
        module="nystrom_attention",
        build=nystrom,
        refuses=both_ways,
        entries=lambda s: 2.0 * landmarks(s),
        note=f"NystromAttention without its convolution, {CORE}",
    ),
    Contender(
        name="linear-attention-transformer",
        label="linear-attention-transformer",
        kind="package",
        module="linear_attention_transformer",
        build=linear,
        definition=linear_definition,
        entries=lambda s: 2.0 * s.width,
        note="softmax over q's width times softmax over k's length: another kernel, not an estimate of softmax attention; causal, in blocks of 64",
    ),
    Contender(
        name="routing-transformer",
        label="routing-transformer",
        kind="package",
        module="routing_transformer",
        build=routing,
        entries=lambda s: routing_window(s) / (2 if s.causal else 1),
        note="KmeansAttention, its memory values set to zero; clusters fitted once, before the clock",
    ),
    Contender(
        name="bigbird",
        label="BigBird (transformers)",
        kind="package",
        module="transformers",
        build=bigbird,
        refuses=bigbird_refuses,
        entries=lambda s: float(sum(bigbird_blocks(s)) and bigbird_blocks(s)[0] * (5 + bigbird_blocks(s)[1])),
        note=f"BigBirdBlockSparseAttention, {CORE}",
    ),
    Contender(
        name="longformer",
        label="Longformer (transformers)",
        kind="package",
        module="transformers",
        build=longformer,
        refuses=both_ways,
        definition=longformer_definition,
        entries=lambda s: 2.0 * longformer_reach(s) + 1,
        note=f"LongformerSelfAttention, no global tokens, {CORE}",
    ),
)


def preload() -> None:
    """Import what is installed of them, so that processes forked from here need not."""
    for name in MODULES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def missing(contender: Contender) -> str:
    """Why it cannot be run at all, if it cannot."""
    if contender.module and importlib.util.find_spec(contender.module) is None:
        return f"{contender.module.replace('_', '-')} is not installed; run: pip install 'scatterbrain[bench]'"
    return ""
