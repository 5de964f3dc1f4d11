"""Which offer each head takes; what is tried of a recipe; looking again during training."""

import dataclasses

import pytest
import torch
from scatterbrain.calibration import Adaptive, Recipe, fit
from scatterbrain.calibration.allocate import Offer, allocate, hull, uniform
from scatterbrain.calibration.measure import entries_of, error_of, look
from scatterbrain.calibration.menu import menu
from scatterbrain.calibration.trial import Trial, sample_rows

from test_fit import capture


def offers(*points):
    return [Offer(Recipe.default(1 / 8), cost, error, 100 * cost, cost, error) for cost, error in points]


def test_hull_keeps_what_no_mixture_beats():
    kept = hull(offers((0.1, 1.0), (0.2, 0.9), (0.3, 0.2), (0.25, 1.1), (0.5, 0.1), (0.6, 0.3)))
    assert [o.cost for o in kept] == [0.1, 0.3, 0.5]


def test_budget_goes_where_it_buys_most():
    steep, flat = offers((0.1, 1.0), (0.3, 0.1)), offers((0.1, 0.3), (0.3, 0.2))
    moved = allocate([steep, flat], budget=0.2)
    assert [o.cost for o in moved] == [0.3, 0.1]
    assert sum(o.error for o in moved) < sum(o.error for o in uniform([steep, flat], 0.2))


def test_least_budget_for_an_error():
    heads = [offers((0.1, 1.0), (0.2, 0.4), (0.4, 0.1))] * 2
    assert [o.cost for o in allocate(heads, error=0.4)] == [0.2, 0.2]
    assert [o.cost for o in allocate(heads, error=0.3)] == [0.4, 0.2]


@pytest.mark.parametrize("kv", [2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_a_trial_is_what_the_library_does(causal, kv):
    """Error and entries at a threshold, on all rows, against attention itself."""
    c = capture(256, causal=causal, kv=kv)
    for recipe in menu(1 / 4, 256, causal):
        trial = Trial(c, recipe.method(256, causal), sample_rows(c, 256))
        gain = trial.gains(torch.tensor([12.0])).mean().reshape(1, 1).expand(2, 1)
        curve = trial.curve(gain.round(decimals=3))
        method = dataclasses.replace(recipe, gain=round(float(gain[0, 0]), 3)).method(256, causal)
        spent, visible = entries_of(c, method)
        assert torch.allclose(curve.entries[:, 0], spent, rtol=0.01)
        assert torch.allclose(curve.visible.double(), visible, rtol=1e-6)
        assert torch.allclose(curve.error[:, 0], error_of(c, look(c), method).double(), rtol=0.1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("policy", ["measured", "paper", "default"])
def test_policies_keep_to_the_budget(policy, causal):
    layers = {"a": [capture(512, causal=causal), capture(512, causal=causal, seed=7)]}
    heads = fit(layers, 1 / 4, policy=policy)["a"]
    assert sum(h.budget for h in heads) / len(heads) < 0.25 * 1.06


def test_measured_is_no_worse_than_the_default():
    layers = {"a": [capture(512), capture(512, seed=7)], "b": [capture(512, seed=20), capture(512, seed=27)]}
    mean = {policy: sum(h.error for heads in fit(layers, 1 / 8, policy=policy).values() for h in heads) / 4 for policy in ("measured", "default")}
    assert mean["measured"] < mean["default"]


def test_smallest_budget_for_an_error():
    layers = {"a": [capture(256), capture(256, seed=7)]}
    loose, tight = (fit(layers, error=e)["a"] for e in (0.6, 0.3))
    for heads, error in ((loose, 0.6), (tight, 0.3)):
        assert sum(h.error for h in heads) / len(heads) <= error
    assert sum(h.budget for h in loose) < sum(h.budget for h in tight)


def test_training_looks_again_and_logs_what_moved():
    seeds, applied = iter(range(10)), []
    adaptive = Adaptive(lambda: {"a": [capture(128, seed=next(seeds))]}, applied.append, 1 / 4, every=2)
    heard = [adaptive.step() for _ in range(5)]
    assert [m is not None for m in heard] == [True, False, True, False, True]
    assert len(applied) == len(adaptive.log) == 3
    assert adaptive.log[0].changed == 2 and adaptive.log[0].moved == 0
    assert set(adaptive.log[1].to_dict()) == {"step", "error", "budget", "moved", "changed", "budgets"}
    still = Adaptive(lambda: {"a": [capture(128, seed=next(seeds))]}, applied.append, 1 / 4, every=1, least=1.0)
    still.step()
    assert still.step().changed == 0
