"""Against independent code: PyTorch's SDPA, performer-pytorch, nystrom-attention. Bounds: see rounding.py."""

import itertools
import math

import pytest
import scatterbrain as sb
import torch
from torch.nn.functional import scaled_dot_product_attention

from rounding import assert_within, average_error, causal, normal, unit, weight_error

IMPLS = ("reference", "torch")
FULL = {"support": sb.Full(), "low_rank": None}


def inputs(n, m, heads=4, kv=4, d=8, e=8, dtype=torch.float64):
    return normal(2, heads, n, d, seed=1, dtype=dtype), normal(2, kv, m, d, seed=2, dtype=dtype), normal(2, kv, m, e, seed=3, dtype=dtype)


def padding(m):
    mask = torch.ones(2, 1, 1, m, dtype=torch.bool)
    mask[0, ..., -(m // 3) :] = False
    mask[1, ..., 1::3] = False
    return mask


def sdpa(q, k, v, mask, is_causal, **rest):
    """SDPA refuses a mask together with is_causal, and its CPU kernel gives NaN for is_causal with scale <= 0: both are joined here."""
    nan = rest.get("scale") is not None and rest["scale"] <= 0
    if is_causal and (mask is not None or nan):
        past = causal(q.shape[2], k.shape[2])
        mask, is_causal = past if mask is None else mask & past, False
    return scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, **rest)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("n,m", [(1, 1), (17, 17), (9, 40), (40, 9)])
def test_full_support_is_sdpa_in_every_combination(impl, n, m):
    for scale, is_causal, padded, kv, e in itertools.product((None, 0.7, -0.3, 0.0), (False, True), (False, True), (4, 2, 1), (8, 5)):
        q, k, v = inputs(n, m, kv=kv, e=e)
        mask = padding(m) if padded and m > 1 else None
        rest = {"scale": scale, "enable_gqa": kv != 4}
        expected = sdpa(q, k, v, mask, is_causal, **rest)
        actual = sb.attention(q, k, v, mask, 0.0, is_causal, impl=impl, **rest, **FULL)
        bound = 2 * average_error(weight_error(q, k, 8**-0.5 if scale is None else scale, q.dtype), v, q.dtype)
        assert_within(actual, expected, bound, (scale, is_causal, padded, kv, e))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_float_mask_means_the_same_as_in_sdpa(impl):
    q, k, v = inputs(13, 21)
    mask = torch.zeros(2, 1, 1, 21, dtype=torch.float64).masked_fill(~padding(21), -math.inf)
    bound = 2 * average_error(weight_error(q, k, 8**-0.5, q.dtype), v, q.dtype)
    expected = scaled_dot_product_attention(q, k, v, mask)
    assert_within(sb.attention(q, k, v, mask, impl=impl, **FULL), expected, bound)
    assert_within(sb.attention(q, k, v, mask.expand(2, 1, 13, 21), impl=impl, **FULL), expected, bound)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_sdpa_rounded_once(impl, is_causal, dtype):
    """The truth is SDPA in float64 on the same rounded inputs; ours works in float32 at least and rounds the output once."""
    q, k, v = inputs(33, 33, dtype=dtype)
    truth = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=is_causal)
    actual = sb.attention(q, k, v, is_causal=is_causal, impl=impl, **FULL)
    assert actual.dtype == dtype
    compute = torch.promote_types(dtype, torch.float32)
    bound = average_error(weight_error(q, k, 8**-0.5, compute), v, compute)
    assert_within(actual, truth, bound + unit(dtype) * truth.abs() + torch.finfo(dtype).tiny)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kv,is_causal", [(4, False), (2, True)])
def test_gradients_are_those_of_sdpa(impl, kv, is_causal):
    q, k, v = inputs(19, 27, kv=kv, e=5)
    mask, d_out = padding(27), normal(2, 4, 19, 5, seed=4)
    ours, theirs = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))
    sb.attention(*ours, mask, 0.0, is_causal, enable_gqa=kv != 4, impl=impl, **FULL).backward(d_out)
    sdpa(*theirs, mask, is_causal, enable_gqa=kv != 4).backward(d_out)
    # a gradient sums at most N * 4 / kv or M terms w * (g.v - g.out) * k, each good to a few times the error of a weight
    size = 2 * 5 * (d_out.abs().max() * v.abs().max() * max(q.abs().max(), k.abs().max(), 1)).item()
    bound = 4 * weight_error(q, k, 8**-0.5, q.dtype) * 27 * 4 / kv * size
    for a, b, name in zip(ours, theirs, "qkv", strict=True):
        assert_within(a.grad, b.grad, bound, name)


def performer_problem(n, m, features=24, d=16):
    package = pytest.importorskip("performer_pytorch.performer_pytorch")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        projection = package.gaussian_orthogonal_random_matrix(features, d).double()
    q, k, v = normal(2, 3, n, d, seed=6), normal(2, 3, m, d, seed=7), normal(2, 3, m, d, seed=8)
    phi = package.softmax_kernel(q, projection_matrix=projection, is_query=True, eps=0.0)
    psi = package.softmax_kernel(k, projection_matrix=projection, is_query=False, eps=0.0)
    ours = sb.Sampled(sb.Performer(features), {"projection": projection})
    reach = d**-0.25 * max(q.norm(dim=-1).max(), k.norm(dim=-1).max()).item()
    exponent = reach * projection.norm(dim=-1).max().item() + reach**2
    feature_error = unit(q.dtype) * ((d + 2) * exponent + 4)
    return package, (q, k, v), (phi, psi), ours, 4 * feature_error + 2 * (features + m) * unit(q.dtype)


@pytest.mark.parametrize("n,m", [(20, 20), (7, 31)])
def test_performer_features_are_performer_pytorchs(n, m):
    """Their stabilisers (a row's, a key set's largest exponent) cancel in the normalised weights; eps is set to 0."""
    package, (q, k, v), (phi, psi), ours, error = performer_problem(n, m)
    theirs = phi @ psi.mT
    theirs = theirs / theirs.sum(-1, keepdim=True)
    out, mine = sb.attention(q, k, v, low_rank=ours, impl="reference", return_weights=True)
    assert_within(mine, theirs, 2 * error * theirs)
    expected = package.linear_attention(phi, psi, v)
    for result in (out, sb.attention(q, k, v, low_rank=ours, impl="torch")):
        assert_within(result, expected, 2 * average_error(error, v, q.dtype))


def test_performer_weights_stand_at_the_scale_of_exp():
    """Not only up to a row's factor: beside an exact key 0, l_ij / a_i0 must be their phi.psi with the stabilisers put back."""
    _, (q, k, _), (phi, psi), ours, error = performer_problem(9, 9)
    projection, root = ours.state["projection"], 16**-0.25
    top_q = (root * q @ projection.mT).amax(-1, keepdim=True)
    top_k = (root * k @ projection.mT).amax((-1, -2), keepdim=True)
    low = (phi * top_q.exp()) @ (psi * top_k.exp()).mT
    a = torch.exp(q @ k[:, :, :1].mT / 4)
    w = sb.attention(q, k, k, support=sb.Columns(index=(0,)), low_rank=ours, impl="reference", return_weights=True)[1]
    ratio = (low / a)[..., 1:]
    assert_within((w / w[..., :1])[..., 1:], ratio, 2 * (error + weight_error(q, k, 0.25, q.dtype)) * ratio)


@pytest.mark.parametrize("impl", IMPLS)
def test_causal_performer_is_performer_pytorchs(impl):
    package, (q, k, v), (phi, psi), ours, error = performer_problem(37, 37)
    expected = package.causal_linear_attention_noncuda(phi, psi, v, chunk_size=5, eps=0.0)
    actual = sb.attention(q, k, v, is_causal=True, low_rank=ours, impl=impl)
    # the prefix sums reach over terms of later size, of one sign, so they add only to the number of terms
    assert_within(actual, expected, 2 * average_error(2 * error, v, q.dtype))


def nystrom_problem(batch, heads, n, marks, iterations):
    package = pytest.importorskip("nystrom_attention.nystrom_attention")
    d = 8
    with torch.random.fork_rng():
        torch.manual_seed(9)
        layer = package.NystromAttention(heads * d, d, heads, marks, iterations, residual=False).double().eval()
    x = normal(batch, n, heads * d, seed=10) * 3
    with torch.no_grad():
        out, (first, inverse, last) = layer(x, return_attn_matrices=True)
        q, k, v = (t.unflatten(-1, (heads, d)).transpose(1, 2) for t in layer.to_qkv(x).chunk(3, -1))
    sums = (first @ inverse @ last).sum(-1, keepdim=True)
    grown = (first.abs() @ inverse.abs()).sum(-1, keepdim=True) / sums.abs()
    middle = torch.softmax(q.unflatten(2, (marks, -1)).mean(3) @ k.unflatten(2, (marks, -1)).mean(3).mT * d**-0.5, -1)
    condition = torch.linalg.cond(middle)[..., None, None]
    error = (weight_error(q, k, d**-0.5, q.dtype) + 8 * iterations * marks * unit(q.dtype)) * (1 + condition) * grown
    return layer, out, (first, inverse, last), (q, k, v), sums, error


@pytest.mark.parametrize("impl", IMPLS)
def test_nystrom_is_nystrom_attentions_with_its_rows_renormalised(impl):
    """One batch entry and head: there their first guess, scaled by the largest norms over all matrices, is ours."""
    _, _, (first, inverse, last), (q, k, v), sums, error = nystrom_problem(1, 1, 48, 8, 6)
    assert (sums - 1).abs().max() > 1e-6  # six iterations do not converge here, so the iterate itself is compared
    expected = first @ inverse @ last @ v / sums
    actual = sb.attention(q, k, v, impl=impl, **sb.presets.nystromformer(16))
    assert (2 * error).max() < 1e-6
    assert_within(actual, expected, 2 * error * v.abs().max())


@pytest.mark.parametrize("impl", IMPLS)
def test_nystrom_is_nystrom_attentions_output_once_converged(impl):
    """With the inverse converged rows sum to one and the first guess no longer matters: any batch, any heads, their output."""
    layer, out, _, (q, k, v), sums, error = nystrom_problem(3, 2, 48, 4, 14)
    assert_within(sums, torch.ones_like(sums), error)
    actual = sb.attention(q, k, v, low_rank=sb.Nystrom(4, iterations=14), impl=impl)
    with torch.no_grad():
        actual = layer.to_out(actual.transpose(1, 2).flatten(2))
    spread = layer.to_out[0].weight.abs().sum(-1).max().item()
    assert (4 * error).max() < 1e-6
    assert_within(actual, out, 4 * error.max() * v.abs().max() * spread)
