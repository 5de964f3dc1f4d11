"""A recipe is a head's method at any length."""

import json

import pytest
import scatterbrain as sb
import torch
from scatterbrain.calibration import Recipe

RECIPES = {
    "default": Recipe.default(1 / 8),
    "everything": Recipe.default(1.0),
    "fixed": Recipe.fixed(sb.Window(64) | sb.Columns(4), sb.ClusterMeans(8)),
    "fitted": Recipe(budget=1 / 8, means=0.05, columns=0.01, window=0.02, gain=-6.0, length=512),
    "fitted, no routes": Recipe(budget=1 / 8, means=0.1, columns=0.02, gain=None, length=512),
    "support only": Recipe.fixed(sb.Window(64), None),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_saves_and_loads(recipe):
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 7, 300, 2048, 8192])
def test_default_spends_its_budget_at_any_length(length, causal):
    method = Recipe.default(1 / 8).method(length, causal)
    spent = sum(part.entries(length, length, 64, causal) for part in method.values() if part is not None)
    assert spent <= max(9, 1.35 * length / 8 / (2 if causal else 1))


def test_fixed_stays():
    recipe = RECIPES["fixed"]
    assert recipe.method(100, False) == recipe.method(5000, True) == {"support": recipe.support, "low_rank": recipe.low_rank}


def test_refuses_nonsense():
    with pytest.raises(ValueError, match="budget"):
        Recipe.default(0.0)
    with pytest.raises(ValueError, match="not both be None"):
        Recipe.fixed(None, None)
    with pytest.raises(ValueError, match="Recipe"):
        Recipe.from_dict({"type": "Plan", "version": 1})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["fitted", "fitted, no routes"])
@pytest.mark.parametrize("length", [1, 7, 300, 4096])
def test_fitted_runs_at_any_length(name, length, causal):
    q, k, v = (torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(s)) for s in range(3))
    out = sb.attention(q, k, v, is_causal=causal, **RECIPES[name].method(length, causal))
    assert torch.isfinite(out).all()


def test_gain_falls_with_the_length():
    """Twice the keys, half the share of each."""
    gains = [RECIPES["fitted"].method(n, False)["support"].parts[0].gain for n in (512, 1024)]
    assert gains[0] == -6.0 and gains[1] == pytest.approx(-6.0 - 0.6931, abs=1e-3)
