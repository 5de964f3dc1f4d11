"""Captured attention in, a recipe for every head out."""

import pytest
import scatterbrain as sb
import torch
from scatterbrain.calibration import Capture, Recipe, fit
from scatterbrain.calibration.measure import entries_of, error_of, look

from cases import normal


def capture(n=256, heads=2, causal=False, seed=0, mask=None, kv=None):
    q, k, v = (normal(1, h, n, 8, seed=seed + s, dtype=torch.float32) for s, h in enumerate((heads, kv or heads, kv or heads)))
    return Capture(q=2 * q, k=2 * k, v=v, causal=causal, key_mask=mask)


@pytest.mark.parametrize("causal", [False, True])
def test_every_head_gets_a_recipe(causal):
    heard = []
    found = fit({"a": [capture(causal=causal)], "b": [capture(seed=3, causal=causal)]}, 1 / 4, progress=lambda *x: heard.append(x))
    assert heard == [(1, 2, "a"), (2, 2, "b")]
    for heads in found.values():
        assert len(heads) == 2
        assert all(0 < h.error < 1.5 and h.entropy > 0 and 0 < h.budget < 0.5 for h in heads)


def test_probes_find_the_matrix_error():
    c = capture(200, kv=1)
    method = Recipe.default(1 / 4).method(200, False)
    _, weights = sb.attention(c.q, c.k, c.v, enable_gqa=True, impl="reference", return_weights=True, **method)
    exact = torch.softmax(c.q @ c.k.mT / 8**0.5, -1)
    true = ((weights - exact).square().sum((2, 3)) / exact.square().sum((2, 3))).sqrt()
    assert torch.allclose(error_of(c, look(c), method), true.flatten(), rtol=0.1)


def test_padding_changes_nothing():
    mask = torch.arange(256)[None, None, None] < 60
    padded, plain = capture(mask=mask), capture()
    short = Capture(q=plain.q[:, :, :60], k=plain.k[:, :, :60], v=plain.v[:, :, :60])
    method = Recipe.fixed(sb.Window(8), sb.ClusterMeans(4)).method(60, False)
    assert torch.allclose(look(padded).entropy, look(short).entropy, rtol=1e-4)
    for a, b in zip(entries_of(padded, method), entries_of(short, method), strict=True):
        assert torch.allclose(a, b)


def test_refuses_nonsense():
    with pytest.raises(ValueError, match="one at a time"):
        fit({"a": [capture()]})
    with pytest.raises(ValueError, match="policy"):
        fit({"a": [capture()]}, 1 / 8, policy="best")
    with pytest.raises(ValueError, match="hold a layer"):
        fit({}, 1 / 8)
