"""What the contract tests run over: every support and every map, listed once, and the one way to compare.

Adding a support or a map: one line here, and it inherits the whole matrix.
"""

from dataclasses import dataclass

import scatterbrain as sb
import torch
from scatterbrain.impl import native, reference
from scatterbrain.problem import check_inputs, resolve

from rounding import assert_within, average_error, weight_error

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
    "routed-fitted": sb.Routed(2, clusters=6, chunk=32, per_chunk=4, fit="queries"),
    "routed-gain": sb.Routed(4, clusters=6, chunk=32, per_chunk=4, fit="queries", gain=-3.5),
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
    "means-fitted": sb.ClusterMeans(6, chunk=32, per_chunk=4, inner=8, fit="queries"),
    "means-second-order": sb.ClusterMeans(6, order=2, chunk=32, per_chunk=4, inner=8),
}
SIGNED = ("performer-trig", "linformer-signed", "nystrom")

PAIRS = [(s, m) for s in (None, *SUPPORTS) for m in (None, *MAPS) if s or m]
EACH = [(s, None) for s in SUPPORTS] + [(None, m) for m in MAPS]
# every part alone, every support with features and with means, every map with a band, a partition and an overlap
COMMON = EACH + [
    (s, m) for s, m in PAIRS if s and m and (m in ("performer", "means", "means-fitted") or s in ("window", "smyrf", "three-overlapping"))
]

NATIVE = [f"native-{isa}" for isa in native.isas()]  # each instruction set that can run here


def parts(pair):
    """The arguments that name a pair of the tables; a method already spelt out stays as it is."""
    if isinstance(pair, dict):
        return pair
    support, low_rank = pair
    return {"support": SUPPORTS.get(support), "low_rank": MAPS.get(low_rank)}


def is_causal_ok(pair):
    return not any(p is not None and p.causal_refusal() for p in parts(pair).values())


def refused(pair):
    """A word of the reason for which the native engine does not cover a pair; empty where it does."""
    support, low_rank = pair
    kinds = {type(part) for part in getattr(SUPPORTS.get(support), "parts", (SUPPORTS.get(support),))}
    if sb.Clusters in kinds:
        return "Clusters"
    if sb.Routed in kinds and low_rank not in (None, "means", "means-fitted", "means-second-order"):
        return "routes alone or over cluster means"
    if low_rank in SIGNED:
        return "non-negative"
    if low_rank == "means-second-order":
        return "first order"
    fits = {part.fit for part in getattr(SUPPORTS.get(support), "parts", (SUPPORTS.get(support),)) if isinstance(part, sb.Routed)}
    over_means = low_rank in ("means", "means-fitted")
    others = kinds & {sb.LSH, sb.Strided, sb.Fixed} or fits - {getattr(MAPS.get(low_rank), "fit", None)}
    return "over cluster means" if over_means and others else ""


COVERED = [pair for pair in PAIRS if not refused(pair)]
COVERED_COMMON = [pair for pair in COMMON if not refused(pair)]


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


def extreme(case, q, k, v):
    """Rule 7's inputs, of 70 tokens."""
    unit = torch.nn.functional.normalize
    if case == "logits-1e4":
        q, k = unit(q, dim=-1) * 170, unit(k, dim=-1) * 170
    elif case == "norms-1e3":
        q, k = unit(q, dim=-1) * 1e3, unit(k, dim=-1) * 1e3
    elif case.startswith("constant"):
        q, k = (torch.full_like(t, 50.0 if case.endswith("large") else 1.0) for t in (q, k))
    elif case == "duplicated":
        q[:, :, 35:], k[:, :, 35:] = q[:, :, :35], k[:, :, :35]
    else:
        k[:, :, 60] *= 300
        q[:, :, 61] *= 300
    return q, k, v


EXTREMES = ["logits-1e4", "norms-1e3", "constant", "constant-large", "duplicated", "spike"]


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


def truth(q, k, v, mask=None, causal=False, support=None, low_rank=None, scale=None, double_count=False, impl="torch"):
    """The reference on what `impl` selects: the native engines find clusters, columns and routes of their own."""
    args = (mask, 0.0, causal, scale, k.shape[1] != q.shape[1])
    low_precision = check_inputs(q.detach(), k.detach(), v.detach(), *args)
    method = resolve(support, low_rank, None, double_count, low_precision)
    layers, found = low_precision.factors(method, engine_of(impl, low_precision))
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


def engine_of(impl, problem):
    _, native_too, isa = impl.partition("native-")
    return native.Engine(isa, problem.query, problem.key, problem.scale) if native_too else None


def run(pair, q, k, v, mask=None, causal=False, gradients=True, what="", impl="torch", **more):
    """Fast against truth, outputs and gradients."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    gqa = k.shape[1] != q.shape[1]
    out = sb.attention(*inputs, mask, is_causal=causal, enable_gqa=gqa, impl=impl, **parts(pair), **more)
    expected = truth(q, k, v, mask, causal, impl=impl, **parts(pair), **more)
    what = f"{pair if isinstance(pair, dict) else name(pair)} {what}"
    assert_close(out.detach(), expected.out.detach(), q.dtype, expected.logits, expected.condition, what)
    if gradients:
        # a gradient is a product of two such sums, and of the inputs' size
        steep = expected.condition**2 * max(1.0, *(t.abs().max().item() for t in (q, k, v)))
        for got, want, which in zip(grads(out, inputs), grads(expected.out, expected.inputs), "qkv", strict=True):
            assert_close(got, want, q.dtype, 4 * expected.logits, steep, f"{what} d{which}")
    return out.detach(), expected


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


def assert_rounded_once(half, full, wide, scale, impl):
    """Half precision gives the float32 result of the same numbers, `wide`, rounded once.

    Processors that multiply pairs of bfloat16 are given weights, and means of values, rounded to it. With u its unit roundoff,
    that errs by u (|l| + |l|) off the support and u |a - l| on it, where the sums of a, of l and of all weights are at most 1
    and the mean's weight on a cluster is at most the exact one (Jensen): 5 u max|v|, the result's own rounding counted.
    Fitted means may weigh more than Jensen's (their offsets estimate the mean of exp): for them the same bound is asked, and is not derived.
    """
    if half.dtype == torch.bfloat16 and impl == "native-avx512":
        q, k, v = (t.detach() for t in wide)
        two_logits = average_error(weight_error(q, k, q.shape[3] ** -0.5 if scale is None else scale, torch.float32), v, torch.float32)
        assert_within(half.detach(), full.detach(), 5 * 2.0**-9 * v.abs().max().item() + two_logits, "half precision")
    else:
        assert torch.equal(half, full.to(half.dtype)), "half precision is not float32 rounded once"
