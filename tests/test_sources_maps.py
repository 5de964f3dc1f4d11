"""Low-rank maps against the formulas of their papers: Linear Transformer, Linformer, Nystromformer, cluster means, GlobalTokens."""

import pytest
import scatterbrain as sb
import torch
from scatterbrain.context import Context
from scatterbrain.features.nystrom import iterative_inverse

from rounding import assert_within, average_error, causal, normal, unit, weight_error, weights

IMPLS = ("reference", "torch")
U = unit(torch.float64)


def qkv(n, m, d=8, e=5, groups=2, seed=0):
    return normal(1, groups, n, d, seed=seed), normal(1, groups, m, d, seed=seed + 1), normal(1, groups, m, e, seed=seed + 2)


def normalised(w):
    return w / w.sum(-1, keepdim=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_elu_plus_one_is_the_linear_transformer(impl, is_causal):
    """phi(x) = elu(x) + 1 of the unscaled inputs, out_i = phi_i . sum phi_j v_j / phi_i . sum phi_j (Katharopoulos et al. 2020, eqs 4-9)."""
    q, k, v = qkv(21, 34)
    phi, psi = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    w = phi @ psi.mT
    w = w * causal(21, 34) if is_causal else w
    bound = 2 * average_error((8 * 8 + 2 * 34) * U, v, q.dtype)
    for scale in (None, 2.0):  # a kernel of its own: no scale in it
        out = sb.attention(q, k, v, is_causal=is_causal, scale=scale, low_rank=sb.EluPlusOne(), impl=impl)
        assert_within(out, normalised(w) @ v, bound)


def projected(q, k, v, f, scale):
    """Linformer: softmax(scale q (F k)') (F v)."""
    return torch.softmax(scale * q @ (f @ k).mT, -1) @ (f @ v)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("m,features", [(36, 6), (37, 6), (5, 8)])
def test_pooled_linformer_is_softmax_over_means(impl, m, features):
    """F averages stretches of m / features keys; of fewer keys than features, each stands for itself."""
    q, k, v = qkv(21, m)
    segment = torch.arange(m) * features // m
    f = normalised((segment == torch.arange(features)[:, None]).double())
    f = f[~f.isnan().any(-1)]
    expected = projected(q, k, v, f, 8**-0.5)
    bound = 2 * average_error(weight_error(q, k, 8**-0.5, q.dtype), v, q.dtype)
    assert_within(sb.attention(q, k, v, low_rank=sb.Linformer(features), impl=impl), expected, bound)


@pytest.mark.parametrize("impl", IMPLS)
def test_gaussian_linformer_is_linformer_with_rows_that_sum_to_one(impl):
    """F is N(0, 1 / features), shifted row by row to sum to one over the keys, so that Linformer's own normaliser is ours."""
    q, k, v = qkv(21, 30)
    sampled = sb.Linformer(6, length=32).sample(8, torch.Generator().manual_seed(1))
    f = sampled.state["projection"][:, :30].double()
    f = f + (1 - f.sum(-1, keepdim=True)) / 30
    assert_within(f.sum(-1), torch.ones(6, dtype=torch.float64), 64 * U)
    low = sampled.config.factor(Context(q[0], k[0], 0.3, False, None), {"projection": sampled.state["projection"].double()})
    assert_within(low.sign_psi * low.log_psi.exp(), f.mT.expand(2, -1, -1), 64 * U)
    attention = torch.softmax(0.3 * q @ (f @ k).mT, -1)
    grown = f.abs().sum(-1).max()  # how much larger the signed terms are than their sum
    bound = 2 * grown * average_error(grown * weight_error(q, k, 0.3, q.dtype), v, q.dtype)
    assert bound < 1e-9
    assert_within(sb.attention(q, k, v, scale=0.3, low_rank=sampled, impl=impl), attention @ (f @ v), bound)


def test_linformers_gaussian_has_variance_one_over_its_rank():
    f = sb.Linformer(16, length=4096).sample(8, torch.Generator().manual_seed(2)).state["projection"].double()
    count = f.numel()
    assert_within(f.mean(), torch.tensor(0.0), 5 * (1 / 16 / count) ** 0.5)
    assert_within(f.square().mean(), torch.tensor(1 / 16), 5 / 16 * (2 / count) ** 0.5)


def spectrum(values, seed=3):
    """A symmetric matrix with these eigenvalues, and its eigenvectors."""
    basis = torch.linalg.qr(normal(len(values), len(values), seed=seed)).Q
    return basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.mT, basis


@pytest.mark.parametrize("steps", [1, 2, 4, 6])
def test_iterative_inverse_has_the_published_third_order_residual(steps):
    """Z <- Z (13 I - AZ (15 I - AZ (7 I - AZ))) / 4 from A' / (|A|_1 |A|_inf): an error e of AZ = 1 - e becomes (3 e^3 + e^4) / 4."""
    values = [1.0, 0.8, 0.5, 0.3]
    a, basis = spectrum(values)
    e = 1 - torch.tensor(values, dtype=torch.float64).square() / (a.abs().sum(0).max() * a.abs().sum(1).max())
    for _ in range(steps):
        e = (3 * e**3 + e**4) / 4
    residual = torch.eye(4, dtype=torch.float64) - basis.mT @ a @ iterative_inverse(a, steps) @ basis
    assert_within(residual, torch.diag(e), 4**3 * 40 * U * (1 / 0.3))


def test_iterative_inverse_is_the_pseudo_inverse():
    """Converged, also for a singular matrix: what rounding leaves in the null space grows by 13/4 a step, and no more."""
    for values, steps in (([1.0, 0.7, 0.4, 0.2], 14), ([1.0, 0.7, 0.4, 0.0], 12)):
        a, _ = spectrum(values)
        z = iterative_inverse(a.expand(3, 4, 4), steps)
        bound = U * 4**3 * ((13 / 4) ** steps if values[-1] == 0 else 40) * 25
        assert bound < 1e-4
        assert_within(z, torch.linalg.pinv(a).expand(3, 4, 4), bound)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("n,m", [(40, 40), (24, 60), (40, 23)])
def test_nystrom_is_the_formula_with_a_true_pseudo_inverse(impl, n, m):
    """softmax(q K') pinv(softmax(Q K')) softmax(Q k') v with segment means Q, K (Xiong et al. 2021, eq 13); lengths may differ."""
    marks, scale = 4, 0.5
    q, k, v = qkv(n, m, seed=20)
    q, k = q * 2, k * 2
    q_mark, k_mark = (segment_means(x, marks) for x in (q, k))
    first, middle, last = (torch.softmax(scale * a @ b.mT, -1) for a, b in ((q, k_mark), (q_mark, k_mark), (q_mark, k)))
    inverse = torch.linalg.pinv(middle)
    grown = (first @ inverse.abs()).sum(-1).max()
    error = grown * (1 + torch.linalg.cond(middle).max()) * (weight_error(q, k, scale, q.dtype) + 8 * 16 * marks * U)
    assert error < 1e-7
    out = sb.attention(q, k, v, scale=scale, low_rank=sb.Nystrom(marks, iterations=16), impl=impl)
    assert_within(out, first @ inverse @ last @ v, 2 * error * v.abs().max())


def segment_means(x, count):
    """Means of the tokens t with floor(t count / length) = s."""
    at = torch.arange(x.shape[2]) * count // x.shape[2]
    return torch.stack([x[:, :, at == s].mean(2) for s in range(count)], 2)


def mean_weights(q, k, node, scale, order):
    """exp(s q.mean(c(j))), at second order times 1 + s^2 q' diag(Var) q / 2."""
    w = torch.zeros(q.shape[0], k.shape[0], dtype=torch.float64)
    for c in node.unique():
        own = k[node == c]
        x = (scale * q @ own.mean(0)).exp()
        if order == 2:
            x = x * (1 + scale**2 * (q**2 @ own.var(0, correction=0)) / 2)
        w[:, node == c] = x[:, None]
    return w


def stretches(m, clusters):
    return torch.arange(m) * clusters // m


def clustered(n, m, clusters, seed=30):
    """Keys in `clusters` stretches around as many centres."""
    q, k = normal(1, 2, n, 6, seed=seed) * 1.5, normal(1, 2, m, 6, seed=seed + 1) * 0.4
    return q, k + 2 * normal(clusters, 6, seed=seed + 2)[stretches(m, clusters)]


@pytest.mark.parametrize("order", [1, 2])
def test_cluster_means_are_their_formula(order):
    q, k = clustered(17, 40, 4)
    low = sb.ClusterMeans(4, order=order)
    node = low.factor(Context(q[0], k[0], 0.4, False, None), {}).node
    for g in range(2):
        assert torch.equal(node[g], stretches(40, 4))  # k-means found the planted clusters
    expected = torch.stack([normalised(mean_weights(q[0, g], k[0, g], node[g], 0.4, order)) for g in range(2)])
    bound = 4 * weight_error(q, k, 0.4, q.dtype)
    assert_within(weights(q, k, scale=0.4, low_rank=low)[0], expected, bound)
    v = normal(1, 2, 40, 5, seed=33)
    out = sb.attention(q, k, v, scale=0.4, low_rank=low, impl="torch")
    assert_within(out[0], expected @ v[0], 2 * average_error(bound, v, q.dtype))


def test_cluster_means_beside_exact_entries_have_the_scale_of_exp():
    """l_ij / a_i0 = exp(s q_i.(mean - k_0)): no factor is lost in normalisation. By Jensen a cluster's mass is never too large."""
    q, k = clustered(17, 40, 4)
    both = weights(q, k, scale=0.4, support=sb.Columns(index=(0,)), low_rank=sb.ClusterMeans(4))[0, 0]
    expected = mean_weights(q[0, 0], k[0, 0], stretches(40, 4), 0.4, 1)
    exact = (0.4 * q[0, 0] @ k[0, 0].mT).exp()
    ratio = (expected / exact[:, :1])[:, 1:]
    assert_within((both / both[:, :1])[:, 1:], ratio, 4 * weight_error(q, k, 0.4, q.dtype) * ratio)
    for c in range(4):
        own = stretches(40, 4) == c
        assert bool((expected[:, own].sum(-1) <= exact[:, own].sum(-1) * (1 + 1e-12)).all())


def test_second_order_means_are_closer_for_a_gaussian_cluster():
    """E exp(q.k) = exp(q.mean + q' Var q / 2) there; for |q' Var q| < 1 the factor 1 + q' Var q / 2 is right to its square."""
    q, k = normal(1, 1, 30, 4, seed=34) * 0.8, normal(1, 1, 2000, 4, seed=35)
    exact = (0.5 * q @ k.mT).exp().mean(-1)[0, 0]
    node = torch.zeros(2000, dtype=torch.int64)
    gaps = [(mean_weights(q[0, 0], k[0, 0], node, 0.5, order)[:, 0] - exact).abs().mean() for order in (1, 2)]
    assert gaps[1] < gaps[0] / 3
    for order in (1, 2):  # and the library's is that formula, seen beside one exact key
        w = weights(q, k, scale=0.5, support=sb.Columns(index=(0,)), low_rank=sb.ClusterMeans(1, order=order))[0, 0]
        expected = mean_weights(q[0, 0], k[0, 0], node, 0.5, order)[:, 1] / (0.5 * q[0, 0] @ k[0, 0, 0]).exp()
        assert_within(w[:, 1] / w[:, 0], expected, 4 * weight_error(q, k, 0.5, q.dtype) * expected)


@pytest.mark.parametrize("order", [1, 2])
def test_causal_cluster_means_use_finished_blocks_only(order):
    """A row's own block of `inner` keys stands for itself; earlier blocks of its chunk by their means; earlier chunks by their clusters."""
    n, chunk, inner, per_chunk = 50, 16, 4, 3
    q, k = clustered(n, n, 3, seed=36)
    low = sb.ClusterMeans(1, order=order, chunk=chunk, per_chunk=per_chunk, inner=inner)
    node = low.factor(Context(q[0], k[0], 0.4, True, None), {}).node[0]
    assert torch.equal(node // per_chunk, torch.arange(n) // chunk)
    i, j = torch.arange(n)[:, None], torch.arange(n)
    w = mean_weights(q[0, 0], k[0, 0], node, 0.4, order)
    w = torch.where(i // chunk == j // chunk, mean_weights(q[0, 0], k[0, 0], j // inner, 0.4, order), w)
    w = torch.where(i // inner == j // inner, (0.4 * q[0, 0] @ k[0, 0].mT).exp(), w)
    expected = normalised(w * causal(n, n))
    bound = 4 * weight_error(q, k, 0.4, q.dtype)
    assert_within(weights(q, k, scale=0.4, low_rank=low, is_causal=True)[0, 0], expected, bound)
    v = normal(1, 2, n, 5, seed=39)
    out = sb.attention(q, k, v, scale=0.4, low_rank=low, is_causal=True, impl="torch")
    assert_within(out[0, 0], expected @ v[0, 0], 2 * average_error(bound, v, q.dtype))
