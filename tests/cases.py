"""What the contract tests run over: every support and every map, listed once, and the one way to compare.

Adding a support or a map: one line here, and it inherits the whole matrix.
"""

from dataclasses import dataclass

import scatterbrain as sb
import torch
from scatterbrain.impl import reference
from scatterbrain.problem import check_inputs, resolve

SUPPORTS = {
    "full": sb.Full(),
    "window": sb.Window(16),
    "window-dilated": sb.Window(10, dilation=3),
    "strided": sb.Strided(7),
    "fixed": sb.Fixed(8, tail=2),
    "random-blocks": sb.RandomBlocks(2, block=8),
    "global": sb.GlobalTokens(3),
    "columns-given": sb.Columns(0, first=2, index=(0,)),
    "columns-heavy": sb.Columns(4, first=1),
    "topk": sb.TopK(5),
    "clusters": sb.Clusters(4, size=12),
    "routed": sb.Routed(2, clusters=6, chunk=32, per_chunk=4),
    "routed-keys": sb.Routed(6, clusters=6, keys=9, chunk=32, per_chunk=4),
    "smyrf": sb.LSH(1, bucket=8),
    "smyrf-rounds": sb.LSH(3, bucket=8),
    "reformer": sb.LSH(2, bucket=8, scheme="reformer"),
    "cross-polytope": sb.LSH(2, bucket=None, scheme="cross_polytope"),
    "cross-polytope-cut": sb.LSH(1, bucket=8, scheme="cross_polytope", functions=2),
    "three-overlapping": sb.Window(9) | sb.GlobalTokens(2) | sb.LSH(2, bucket=8, scheme="reformer"),
    "columns-window-routed": sb.Routed(2, clusters=6, chunk=32, per_chunk=4) | sb.Columns(2) | sb.Window(6),
}

MAPS = {
    "performer": sb.Performer(16),
    "performer-iid": sb.Performer(16, orthogonal=False),
    "performer-cosh": sb.Performer(16, kind="cosh"),
    "performer-trig": sb.Performer(256, kind="trig"),
    "elu": sb.EluPlusOne(),
    "linformer": sb.Linformer(6),
    "linformer-signed": sb.Linformer(6, length=128),
    "nystrom": sb.Nystrom(6),
    "global": sb.GlobalTokens(3),
    "means": sb.ClusterMeans(6, chunk=32, per_chunk=4, inner=8),
    "means-second-order": sb.ClusterMeans(6, order=2, chunk=32, per_chunk=4, inner=8),
}
SIGNED = ("performer-trig", "linformer-signed", "nystrom")

PAIRS = [(s, m) for s in (None, *SUPPORTS) for m in (None, *MAPS) if s or m]
EACH = [(s, None) for s in SUPPORTS] + [(None, m) for m in MAPS]
# every part alone, every support with features and with means, every map with a band, a partition and an overlap
COMMON = EACH + [(s, m) for s, m in PAIRS if s and m and (m in ("performer", "means") or s in ("window", "smyrf", "three-overlapping"))]


def parts(pair):
    support, low_rank = pair
    return {"support": SUPPORTS.get(support), "low_rank": MAPS.get(low_rank)}


def is_causal_ok(pair):
    return not any(p is not None and p.causal_refusal() for p in parts(pair).values())


def name(pair):
    return "+".join(p or "none" for p in pair)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(n, m, d=8, e=5, batch=2, heads=2, seed=0, dtype=torch.float64):
    return (
        normal(batch, heads, n, d, seed=seed, dtype=dtype),
        normal(batch, heads, m, d, seed=seed + 1, dtype=dtype),
        normal(batch, heads, m, e, seed=seed + 2, dtype=dtype),
    )


def some_keys(batch, m, seed=5):
    """A key mask with at least one visible key in each row, the first."""
    mask = torch.rand(batch, 1, 1, m, generator=torch.Generator().manual_seed(seed)) > 0.25
    mask[..., 0] = True
    return mask


@dataclass
class Truth:
    """The reference in float64, on the selection and clusters that the given dtype finds."""

    out: torch.Tensor
    weights: torch.Tensor
    support: torch.Tensor
    inputs: list
    logits: float  # the largest exponent, which rounding of the logits scales with

    @property
    def condition(self):
        """sum |w| / |sum w|, the largest over rows: 1 for non-negative weights."""
        return max(1.0, self.weights.abs().sum(-1).max().item())


def truth(q, k, v, mask=None, causal=False, support=None, low_rank=None, scale=None, double_count=False):
    args = (mask, 0.0, causal, scale, False)
    low_precision = check_inputs(q.detach(), k.detach(), v.detach(), *args)
    method = resolve(support, low_rank, None, double_count, low_precision)
    layers, found = low_precision.factors(method)
    inputs = [t.detach().double().requires_grad_() for t in (q, k, v)]
    p = check_inputs(*inputs, *args)
    _, low = p.factors(resolve(support, low_rank, None, double_count, p))
    if hasattr(low, "node"):
        low = found
    out, weights, dense = reference.attend(p.q * p.scale, p.k, p.v, layers, low, p.key_mask, causal, double_count)
    b, h = q.shape[:2]
    reach = (p.q.norm(dim=-1).max() * p.k.norm(dim=-1).max()).item() * abs(p.scale) if p.k.numel() else 1.0
    if hasattr(low, "log_phi"):
        finite = [t[torch.isfinite(t)] for t in (low.log_phi, low.log_psi)]
        reach = max(reach, *(t.abs().max().item() if t.numel() else 0.0 for t in finite))
    return Truth(out.view(b, h, *out.shape[1:]), weights.view(b, h, *weights.shape[1:]), dense.view(b, h, *dense.shape[1:]), inputs, reach)


def assert_close(actual, expected, dtype, logits=1.0, condition=1.0, what=""):
    """The one tolerance: rounding of exponents of size `logits`, amplified by `condition`, with a factor for sums.

    1e-5 of a float32 result may go where low-rank mass is taken out (engine.py recomputes rows that would lose more).
    """
    eps = torch.finfo(dtype).eps
    bound = (4 * eps * (1 + logits) + (1e-5 if dtype != torch.float64 else 1e-9)) * condition
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert bool(torch.isfinite(actual).all()), f"{what}: not finite"
    if expected.numel() == 0:
        return
    scale = 1 + expected.abs().max().item()
    error = (actual.double() - expected.double()).abs().max().item() / scale
    assert error <= bound, f"{what}: error {error:.2e} of the largest value, bound {bound:.2e}"


def grads(out, inputs, seed=9):
    probe = normal(*out.shape, seed=seed).to(out.dtype)
    return torch.autograd.grad((out * probe).sum(), inputs)
