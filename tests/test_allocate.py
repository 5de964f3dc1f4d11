"""Which offer each head takes; what is tried of a recipe; looking again during training."""

import dataclasses
import math

import pytest
import scatterbrain as sb
import torch
from scatterbrain.calibration import Adaptive, Recipe, fit
from scatterbrain.calibration.allocate import Offer, allocate, error_loss, few, hull, price, uniform
from scatterbrain.calibration.measure import entries_of, error_of, look
from scatterbrain.calibration.menu import menu
from scatterbrain.calibration.trial import Trial, sample_rows
from scatterbrain.impl.reference import dense_mask
from scatterbrain.problem import check_inputs, resolve

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


def test_the_price_is_what_the_last_unit_bought():
    heads = [offers((0.1, 1.0), (0.3, 0.1)), offers((0.1, 0.3), (0.3, 0.2))]
    assert price(heads, 0.1) == pytest.approx(0.9 / 0.2)  # the first step is already too dear
    assert price(heads, 0.2) == pytest.approx(0.1 / 0.2)
    assert price(heads, 0.3) == 0.0


def test_a_layer_has_few_kinds_and_the_best_of_them():
    """Three recipes, three heads: the one in the middle is second best for all, and best in common."""
    recipes = [Recipe(budget=0.2, means=m, gain=-1.0) for m in (0.1, 0.2, 0.3)]
    errors = ((0.1, 0.2, 0.9), (0.9, 0.2, 0.1), (0.5, 0.1, 0.5))
    layer = [
        [Offer(dataclasses.replace(r, gain=-2.0 - n), 0.2, e, 20, 0.2, e) for r, e in zip(recipes, row, strict=True)] for n, row in enumerate(errors)
    ]
    for kinds, means in ((1, {0.2}), (2, {0.1, 0.2}), (3, {0.1, 0.2, 0.3}), (9, {0.1, 0.2, 0.3})):
        kept = few(layer, kinds, error_loss, 1.0)
        assert all({o.recipe.means for o in head} == means for head in kept)


def test_a_loss_of_ones_own_decides():
    heads = [[Offer(Recipe.default(1 / 8), c, e, 1, c, e, harm) for c, e, harm in ((0.1, 0.5, 0.9), (0.3, 0.4, 0.1))]] * 2
    heads[1] = [dataclasses.replace(o, harm=0.9) for o in heads[1]]
    assert [o.cost for o in allocate(heads, budget=0.2, loss=lambda o: o.harm)] == [0.3, 0.1]
    assert [o.cost for o in uniform(heads, 0.3, loss=lambda o: -o.harm)] == [0.1, 0.1]


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


@pytest.mark.parametrize("kv", [2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_harm_and_mass_are_their_definitions(causal, kv):
    """(pull . error of the output)^2 over all rows, and attention on visited clusters beyond columns and window, from dense weights."""
    c = capture(128, causal=causal, kv=kv)
    c = dataclasses.replace(c, pull=torch.randn(c.q.shape, generator=torch.Generator().manual_seed(3)))
    recipe = menu(1 / 4, 128, causal)[0]
    trial = Trial(c, recipe.method(128, causal), sample_rows(c, 128))
    gain = trial.gains(torch.tensor([12.0])).mean().reshape(1, 1).expand(2, 1).round(decimals=3)
    curve = trial.curve(gain)
    method = dataclasses.replace(recipe, gain=round(float(gain[0, 0]), 3)).method(128, causal)
    _, weights = sb.attention(c.q, c.k, c.v, is_causal=causal, enable_gqa=True, impl="reference", return_weights=True, **method)
    k, v = (t.repeat_interleave(2 // kv, 1) for t in (c.k, c.v))
    logits = c.q @ k.mT / 8**0.5
    if causal:
        logits = logits.masked_fill(~torch.ones(128, 128, dtype=torch.bool).tril(), float("-inf"))
    exact = torch.softmax(logits, -1)
    harm = ((weights - exact) @ v * c.pull).sum(-1).square().sum(-1)
    assert torch.allclose(curve.harm[:, 0].float(), harm[0], rtol=0.02)
    problem = check_inputs(c.q, c.k, c.v, None, 0.0, causal, None, kv != 2)
    parts = method["support"].parts
    router, others = [p for p in parts if isinstance(p, sb.Routed)], [p for p in parts if not isinstance(p, sb.Routed)]
    visited, fixed = (pairs_of(problem, sb.Union(tuple(p))) for p in (router, others))
    assert torch.allclose(curve.mass[:, 0].float(), (exact[0] * (visited & ~fixed)).sum((1, 2)) / 128, rtol=0.02)


def pairs_of(problem, support):
    """(G, N, M) of the pairs of a support, by the reference."""
    layers, _ = problem.factors(resolve(support, None, None, False, problem))
    _, n, m, _ = problem.sizes
    held = sum(dense_mask(layer, n, m).int() for layer in layers) > 0
    return held & torch.ones(n, m, dtype=torch.bool).tril() if problem.causal else held


def test_a_model_objective_spares_what_the_model_feels():
    """Two layers alike but for their pull: the felt one gets more of the entries."""
    plain = [capture(256, seed=s) for s in (0, 7)]
    layers = {name: [dataclasses.replace(c, pull=size * torch.ones_like(c.q)) for c in plain] for name, size in (("felt", 1.0), ("not", 1e-3))}
    found = fit(layers, 1 / 8, objective="model")
    spent = {name: sum(h.budget for h in heads) for name, heads in found.items()}
    harm = {name: sum(h.harm for h in heads) for name, heads in found.items()}
    assert spent["felt"] > spent["not"] and harm["felt"] > harm["not"] > 0
    assert sum(spent.values()) / 4 < 1 / 8 * 1.06


def test_kinds_bound_the_recipes_of_a_layer():
    layers = {"a": [capture(512, heads=6), capture(512, heads=6, seed=7)]}

    def kinds(n):
        return {dataclasses.replace(h.recipe, gain=0.0, budget=1.0) for h in fit(layers, 1 / 8, kinds=n)["a"]}

    assert len(kinds(1)) == 1 < len(kinds(99))
    with pytest.raises(ValueError, match="kinds must be an integer"):
        fit(layers, 1 / 8, kinds=0)


def test_objectives_that_do_not_fit_are_refused():
    layers = {"a": [capture(128), capture(128, seed=7)]}
    with pytest.raises(ValueError, match="a must hold captures with their pull; got none; pass objective='matrix'"):
        fit(layers, 1 / 8, objective="model")
    for more in ({"budget": 1 / 8, "policy": "paper"}, {"error": 0.1}):
        with pytest.raises(ValueError, match="objective must be 'matrix' where an error is asked for, or another policy"):
            fit(layers, objective="model", **more)
    with pytest.raises(ValueError, match="objective must be one of 'model', 'matrix'; got speed"):
        fit(layers, 1 / 8, objective="speed")


@pytest.mark.parametrize("causal", [False, True])
def test_the_menu_can_be_run_at_any_length_and_budget(causal):
    for length in (1, 7, 64, 300, 512, 1024, 4096):
        for budget in (1 / 256, 1 / 64, 1 / 40, 1 / 8, 1 / 2, 1.0):
            for recipe in menu(budget, length, causal):
                assert set(recipe.method(length, causal)) == {"support", "low_rank"}
                assert recipe.method(4 * length, causal)


def test_other_rows_of_one_capture_are_other_rows():
    """Held-out rows of a single capture begin where the others do, and share nothing else with them."""
    c = capture(300, causal=True)
    recipe = menu(1 / 4, 300, True)[0]
    rows, memo = [sample_rows(c, 256, shift=s) for s in (0.25, 0.75)], {}
    assert int(rows[0][0]) == int(rows[1][0]) and not torch.equal(*rows)
    gain = torch.full((2, 1), -5.0)
    shared = [Trial(c, recipe.method(300, True), r, memo).curve(gain).error for r in rows]
    assert torch.equal(shared[1], Trial(c, recipe.method(300, True), rows[1]).curve(gain).error)


def test_a_pull_has_the_outputs_shape():
    c = capture(32)
    with pytest.raises(ValueError, match=r"pull must have the output's shape \(1, 2, 32, 8\); got torch.Size\(\[1, 32, 2, 8\]\)"):
        dataclasses.replace(c, pull=torch.zeros(1, 32, 2, 8))


def test_harm_is_told_only_where_it_was_looked_for():
    found = fit({"a": [capture(128), capture(128, seed=7)]}, 1 / 8)["a"]
    assert all(math.isnan(h.harm) and 0 <= h.cluster_mass <= 1 for h in found)


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
