"""Random features against Choromanski et al. 2021: what is drawn, means and variances in closed form, by Monte Carlo within 5 deviations."""

import math

import pytest
import scatterbrain as sb
import torch
from scatterbrain.context import Context

from rounding import assert_within, normal, unit

KINDS = ("positive", "cosh", "trig")


def draw(features, d, seed=1, **settings):
    return sb.Performer(features, **settings).sample(d, torch.Generator().manual_seed(seed))


def terms(q, k, features, kind, orthogonal, seed=1, scale=1.0):
    """The estimate of exp(scale q.k) as one number a projection: their mean is phi(q).psi(k). A pair of features shares a projection."""
    sampled = draw(features, len(q), seed, kind=kind, orthogonal=orthogonal)
    state = {"projection": sampled.state["projection"].double()}
    f = sampled.config.factor(Context(q[None, None], k[None, None], scale, False, None), state)
    product = (f.log_phi + f.log_psi)[0, 0].exp()
    if kind == "trig":
        product = product * f.sign_phi[0, 0] * f.sign_psi[0, 0]
    each = product if kind == "positive" else product.view(2, -1).sum(0)
    return each * len(each)


def variance(kind, q, k):
    """Of one projection's term: the kernel's own exponents, with z = q + k and y = q - k."""
    z2, y2, norms = (q + k).square().sum(), (q - k).square().sum(), q.square().sum() + k.square().sum()
    return {
        "positive": (z2.exp() - 1) * z2.exp() * (-norms).exp(),
        "cosh": (z2.exp() - 1).square() / 2 * (-norms).exp(),
        "trig": (1 - (-y2).exp()).square() / 2 * norms.exp(),
    }[kind]


def pairs():
    """Norms up to 1: near, opposite, across, and one shorter."""
    x, y = torch.linalg.qr(normal(8, 2, seed=2)).Q.unbind(-1)
    return {"near": (x, 0.9 * x + 0.1 * y), "opposite": (x, -x), "across": (x, y), "short": (0.5 * x, 0.3 * x + 0.4 * y)}


def deviation_of_variance(x):
    """Standard deviation of the sample variance, from the fourth moment."""
    c = x - x.mean()
    return ((c.pow(4).mean() - c.square().mean().square()) / len(x)).sqrt()


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", ["near", "opposite", "across", "short"])
def test_estimates_are_unbiased_with_the_published_variance(kind, orthogonal, pair):
    q, k = pairs()[pair]
    count = 160000
    x = terms(q, k, count if kind == "positive" else 2 * count, kind, orthogonal)
    assert len(x) == count
    expected = variance(kind, q, k)
    # rows of one orthogonal block are correlated, but blocks are independent: the deviation of a mean of block means
    groups = x.view(-1, 8).mean(1)
    assert_within(x.mean(), (q @ k).exp(), 5 * (groups.var() / len(groups)).sqrt() + 1e-12)
    # a row alone is distributed as an iid one, so its variance is the closed form; block members taken in turn are independent
    one = x.view(-1, 8)[:, 3]
    assert_within(one.var(), expected, 5 * deviation_of_variance(one) + 1e-12)
    if not orthogonal:
        assert_within(groups.var(), expected / 8, 5 * deviation_of_variance(groups) + 1e-12)


def test_cosh_pairs_beat_plain_positive_features():
    """Variance (1 - exp(-|q + k|^2)) / 2 of plain ones for as many projections: lemma 2."""
    q, k = pairs()["near"]
    plain, paired = (terms(q, k, n, kind, False) for n, kind in ((160000, "positive"), (320000, "cosh")))
    ratio = (1 - (-(q + k).square().sum()).exp()) / 2
    error = 5 * (deviation_of_variance(paired) / plain.var() + ratio * deviation_of_variance(plain) / plain.var())
    assert_within(paired.var() / plain.var(), ratio, error)
    assert paired.var() < plain.var()


@pytest.mark.parametrize("pair", ["near", "across", "short"])
def test_orthogonal_features_have_less_variance_by_at_least_the_theorem(pair):
    """Theorem 2: MSE(ort) <= MSE(iid) - 2 (m - 1) / (m (d + 2)) (SM - exp(-(|q|^2 + |k|^2) / 2))^2 with m = d rows in a block.

    At half the norms above, where the fourth moments, and so the measurement, are tame.
    """
    q, k = (t / 2 for t in pairs()[pair])
    iid, ort = (terms(q, k, 640000, "positive", o, seed=3).view(-1, 8).mean(1) for o in (False, True))
    noise = (deviation_of_variance(iid).square() + deviation_of_variance(ort).square()).sqrt()
    gap = 2 * 7 / (8 * 10) * ((q @ k).exp() - (-(q.square().sum() + k.square().sum()) / 2).exp()).square()
    gain = iid.var() - ort.var()
    assert gain >= gap - 5 * noise
    assert gain > 5 * noise


@pytest.mark.parametrize("kind,features,rows", [("positive", 40, 40), ("cosh", 40, 20), ("trig", 72, 36)])
def test_orthogonal_projections_are_orthogonal_inside_blocks_with_gaussian_lengths(kind, features, rows):
    w = draw(features, 16, kind=kind).state["projection"]
    assert w.shape == (rows, 16)
    for block in w.split(16):
        directions = torch.nn.functional.normalize(block, dim=-1)
        assert_within(directions @ directions.mT, torch.eye(len(block)), 16 * 4 * unit(torch.float32))
    iid = torch.nn.functional.normalize(draw(features, 16, kind=kind, orthogonal=False).state["projection"][:16], dim=-1)
    assert (iid @ iid.mT - torch.eye(len(iid))).abs().max() > 0.1


@pytest.mark.parametrize("orthogonal", [False, True])
def test_lengths_are_chi_distributed(orthogonal):
    """|w|^2 of d normals: mean d, variance 2 d, fourth central moment 12 d (d + 4). Lengths are not tied to sqrt(d)."""
    square = draw(16 * 4000, 16, orthogonal=orthogonal).state["projection"].double().square().sum(-1)
    assert_within(square.mean(), torch.tensor(16.0), 5 * math.sqrt(32 / len(square)))
    assert_within(square.var(), torch.tensor(32.0), 5 * math.sqrt((12 * 16 * 20 - 32**2) / len(square)))


@pytest.mark.parametrize("scale", [0.25, -0.25])
@pytest.mark.parametrize("kind", KINDS)
def test_scale_enters_as_in_the_softmax_kernel(kind, scale):
    """exp(scale q.k), the sign of the scale included."""
    q, k = (t * 2 for t in pairs()["near"])
    x = terms(q, k, 160000, kind, False, scale=scale)
    expected = (scale * q @ k).exp()
    assert_within(x.mean(), expected, 5 * (x.var() / len(x)).sqrt())
    assert abs(expected - (-scale * q @ k).exp()) > 0.5


def test_features_are_the_formulas():
    """phi(x) = exp(w.x - |x|^2 / 2) / sqrt(m); with -w beside w; and exp(|x|^2 / 2) (cos w.x, sin w.x) / sqrt(m)."""
    q, k = normal(1, 5, 8, seed=4) / 3, normal(1, 7, 8, seed=5) / 3
    for kind in KINDS:
        sampled = draw(12, 8, kind=kind)
        w = sampled.state["projection"].double()
        f = sampled.config.factor(Context(q, k, 1.0, False, None), {"projection": w})
        for x, log, sign in ((q, f.log_phi, f.sign_phi), (k, f.log_psi, f.sign_psi)):
            half, wx = x.square().sum(-1, keepdim=True) / 2, x @ w.mT
            expected = {
                "positive": (wx - half).exp() / 12**0.5,
                "cosh": torch.cat([(wx - half).exp(), (-wx - half).exp()], -1) / 12**0.5,
                "trig": half.exp() * torch.cat([wx.cos(), wx.sin()], -1) / 6**0.5,
            }[kind]
            actual = log.exp() if sign is None else sign * log.exp()
            assert_within(actual, expected, 64 * unit(q.dtype) * expected.abs().max(), kind)
