"""A recipe is a head's method at any length."""

import json

import pytest
import scatterbrain as sb
from scatterbrain.calibration import Recipe

RECIPES = {
    "default": Recipe.default(1 / 8),
    "everything": Recipe.default(1.0),
    "fixed": Recipe.fixed(sb.Window(64) | sb.Columns(4), sb.ClusterMeans(8)),
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
