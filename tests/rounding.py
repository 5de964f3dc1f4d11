"""Error bounds from first principles, and the selected pairs of a support, for tests against other people's code.

With unit roundoff u, a dot product of length d errs by at most d u |a||b|, so an exponential of it by that factor in relative
terms; a normalised average of M values with weights good to r errs by at most (2 r + 2 M u) max|v|. Two codes err twice.
"""

import scatterbrain as sb
import torch


def unit(dtype):
    return torch.finfo(dtype).eps


def weight_error(q, k, scale, dtype):
    """Relative error of a normalised softmax weight computed in `dtype`."""
    reach = (q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max() * abs(scale)).item()
    return unit(dtype) * (2 * (q.shape[-1] + 2) * reach + 2 * k.shape[-2] + 8)


def average_error(weight, v, dtype):
    """Error of an average of the rows of v whose weights are good to `weight`."""
    return (weight + 2 * v.shape[-2] * unit(dtype)) * v.double().abs().max().item()


def assert_within(actual, expected, bound, what=""):
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    gap = (actual.double() - expected.double()).abs()
    assert bool((gap <= bound).all()), f"{what}: off by {gap.max().item():.3g}, bound {torch.as_tensor(bound).max().item():.3g}"


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def weights(q, k, mask=None, **method):
    """The reference's (B, H, N, M) weights."""
    return sb.attention(q, k, k, mask, impl="reference", return_weights=True, **method)[1]


def pattern(support, q, k, mask=None, **more):
    """The pairs that a support selects: exact weights are positive there and zero elsewhere. Logits must be moderate."""
    return weights(q, k, mask, support=support, low_rank=None, **more) > 0


def causal(n, m):
    return torch.ones(n, m, dtype=torch.bool).tril()
