"""The analysis against cases whose answer is known."""

import math

import pytest
import scatterbrain as sb
import torch
from scatterbrain import analysis
from scatterbrain.analysis.estimators import any_round
from scatterbrain.lab.analyze_recovery import planted


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def stochastic(*shape, sharp=2.0):
    return torch.softmax(sharp * torch.randn(*shape, generator=generator(), dtype=torch.float64), -1)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))]


def test_top_k_and_svd_are_the_best_of_their_kind():
    matrix = stochastic(3, 20, 30)
    kept = analysis.top_k(matrix, 4)
    assert ((kept != 0).sum(-1) == 4).all()
    assert torch.allclose(kept.sum(-1), matrix.sort(-1, descending=True).values[..., :4].sum(-1))
    singular = torch.linalg.svdvals(matrix)
    for rank in (0, 3, 20):
        error = analysis.relative_error(analysis.truncated_svd(matrix, rank), matrix)
        known = singular[:, rank:].square().sum(-1).sqrt() / singular.square().sum(-1).sqrt()
        assert torch.allclose(error, known, atol=1e-12)
        assert torch.allclose(analysis.low_rank_errors(matrix, [rank])[:, 0], known, atol=1e-7)
    for keys in (0, 4, 30, 99):
        assert torch.allclose(analysis.sparse_errors(matrix, [keys])[:, 0], analysis.relative_error(analysis.top_k(matrix, keys), matrix), atol=1e-7)


def test_a_rank_costs_two_entries_a_row_of_a_square_matrix():
    assert analysis.rank_cost((64, 64)) == 2
    assert analysis.rank_for(9, (64, 64)) == 4
    assert analysis.rank_for(9, (10, 20)) == 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [60, 200])  # a decomposition, and block power steps
def test_alternating_projections_find_what_was_planted(size, device):
    low, _ = planted(size, 3, 0.0, 2, seed=1)
    spots = torch.rand(2, size, size, generator=generator()).argsort(-1) < 2
    sparse = spots.double() * 2
    matrix = (low + sparse).to(device)
    found = analysis.sparse_low_rank(matrix, 2, 3, iterations=100, tolerance=0)
    assert found.error.max() < 1e-6
    assert analysis.relative_error(found.low_rank, low.to(device)).max() < 1e-5
    assert (found.keys, found.rank) == (2, 3)


def test_more_iterations_never_hurt_and_the_ends_of_a_mix_are_the_oracles():
    matrix = stochastic(2, 140, 140)
    errors = [analysis.sparse_low_rank(matrix, 6, 4, iterations=i).error for i in (1, 5, 20)]
    assert (errors[1] <= errors[0]).all() and (errors[2] <= errors[1]).all()
    mixed = analysis.mixes(matrix, 20, (0.0, 0.5, 1.0))
    assert torch.allclose(mixed.errors[:, 0], analysis.low_rank_errors(matrix, [10])[:, 0])
    assert torch.allclose(mixed.errors[:, 2], analysis.sparse_errors(matrix, [20])[:, 0])
    assert mixed.keys == (0, 10, 20) and mixed.ranks == (10, 5, 0)
    assert (mixed.best <= mixed.errors[:, 1]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_robust_pca_recovers_what_the_theory_promises(device):
    low, sparse = planted(100, 5, 0.1, 2, seed=3)
    found = analysis.robust_pca((low + sparse).to(device))
    assert found.converged.all() and found.gap.max() < 1e-3
    assert analysis.relative_error(found.low_rank, low.to(device)).max() < 1e-5
    assert found.rank.tolist() == [5, 5]
    assert ((found.sparse.abs() > 0.5).cpu() == (sparse != 0)).all()


def test_the_duality_gap_tells_a_pursuit_that_stopped_short():
    """With the usual growth of 1.5 the answer is feasible and wrong; slower growth recovers the same matrix."""
    low, sparse = planted(100, 20, 0.05, 1, seed=0)
    fast = analysis.robust_pca(low + sparse, growths=(1.5,))
    assert fast.residual.max() < 1e-7 and fast.gap.min() > 0.05 and not fast.converged.any()
    slow = analysis.robust_pca(low + sparse)
    assert slow.converged.all()
    assert analysis.relative_error(slow.low_rank, low).max() < 1e-5 < analysis.relative_error(fast.low_rank, low).min()


def test_robust_pca_takes_batches_zeros_and_says_when_it_has_not_converged():
    low, sparse = planted(40, 2, 0.05, 3, seed=0)
    whole = analysis.robust_pca(low + sparse)
    one = analysis.robust_pca((low + sparse)[1])
    assert torch.allclose(whole.low_rank[1], one.low_rank, atol=1e-6)
    assert analysis.robust_pca(torch.zeros(2, 8, 8)).converged.all()
    heard = []
    assert not analysis.robust_pca(low, iterations=2, growths=(1.2,), tick=lambda step, residual: heard.append(step)).converged.any()
    assert heard == [1, 2]
    with pytest.raises(ValueError, match="matrix must be float32 or float64"):
        analysis.robust_pca(low.half())


def test_a_pursuit_cut_to_a_budget_keeps_to_it():
    low, sparse = planted(60, 3, 0.03, 2, seed=2)
    found = analysis.robust_pca(low + sparse)
    cut = analysis.at_budget(found, low + sparse, 20)
    assert cut.keys + 2 * cut.rank <= 20
    assert torch.allclose(cut.error, analysis.relative_error(cut.whole, low + sparse))
    assert cut.error.max() < 1e-5


def test_entropy_of_the_extremes():
    assert float(analysis.entropy(torch.full((5, 8), 1 / 8))) == pytest.approx(math.log(8))
    assert float(analysis.entropy(torch.eye(6))) == 0


def test_correlations_of_known_lists():
    pytest.importorskip("scipy")
    x = [1.0, 2, 3, 4, 5, 6]
    for found in analysis.correlations(x, [-v for v in x]):
        assert found.coefficient == pytest.approx(-1)
        assert found.p_value < 0.01
    spearman, pearson, kendall = analysis.correlations(x, [math.exp(v) for v in x])
    assert spearman.coefficient == pytest.approx(1) and kendall.coefficient == pytest.approx(1) and 0.5 < pearson.coefficient < 0.99
    with pytest.raises(ValueError, match="x and y must vary"):
        analysis.correlations(x, [1.0] * 6)


def test_exponents_of_a_power_law():
    x = [64, 128, 256, 512]
    found = analysis.exponent(x, [3 * v**1.7 for v in x])
    assert (found.power, found.factor, found.error) == (pytest.approx(1.7), pytest.approx(3), pytest.approx(0, abs=1e-9))
    with pytest.raises(ValueError, match="at least two positive finite numbers"):
        analysis.exponent([1, 2], [0, 1])


@pytest.mark.parametrize(
    ("matrix", "said"),
    [
        (torch.tensor([[0.5, float("nan")]]), "attention must hold finite numbers; got 1 that are not"),
        (torch.tensor([[0.5, 0.5], [0.5, 0.4]]), "attention must have rows that sum to one; got a sum of 0.9 in row 1"),
        (torch.tensor([[1.5, -0.5]]), "attention must hold no negative weight"),
        (torch.zeros(3), "attention must have shape"),
        (torch.ones(2, 2, dtype=torch.int64), "attention must hold floating-point numbers"),
        ([[1.0]], "attention must be a tensor"),
    ],
)
def test_a_matrix_that_is_no_attention_is_refused_in_one_line(matrix, said):
    with pytest.raises(ValueError, match=said) as refused:
        analysis.check_attention(matrix)
    assert "\n" not in str(refused.value)


def test_masked_rows_and_half_precision_are_attention():
    analysis.check_attention(torch.tensor([[0.0, 0.0], [0.5, 0.5]]))
    analysis.check_attention(stochastic(4, 64, 64).half())


@pytest.mark.parametrize("budget", [0.001, 0, -1, 2, float("nan"), True, "much"])
def test_a_budget_that_buys_nothing_is_refused(budget):
    with pytest.raises(ValueError, match="budget must"):
        analysis.check_budget(budget, 512)


DOTS = [-0.8, -0.4, 0.0, 0.2]


def test_performer_is_unbiased_with_the_closed_forms_variance():
    found = analysis.performer_moments(DOTS, 16, 64, 4000)
    dots = torch.tensor(DOTS, dtype=torch.float64)
    assert ((found.mean - dots.exp()).abs() < 5 * found.mean_error).all()
    # Of 4,000 draws a variance is off by a tenth or so: its own spread grows with |q + k|.
    assert (found.variance / analysis.performer_variance(dots, 64) - 1).abs().max() < 0.25


def test_scatterbrain_is_unbiased_and_its_variance_is_smaller_by_the_hash():
    """Rounds make pairs collide often, and many features tame the tails that make a measured variance vary."""
    dots = [0.0, 0.2, 0.4]
    found = analysis.scatterbrain_moments(dots, 4, 512, 4000, rounds=8, seed=1)
    assert ((found.mean - torch.tensor(dots, dtype=torch.float64).exp()).abs() < 5 * found.mean_error).all()
    hit = any_round(analysis.measured_hits(dots, 4, 2000), 8)
    assert hit.min() > 0.1
    ratio = found.variance / analysis.performer_variance(torch.tensor(dots, dtype=torch.float64), 512)
    assert (ratio - (1 - hit)).abs().max() < 0.15


def test_collisions_at_the_ends_and_the_formula():
    hit = analysis.measured_hits([-1.0, 0.0, 0.5, 0.9, 1.0], 32, 200)
    assert hit[0] == 0 and hit[-1] == 1
    assert (hit.diff() > 0).all()
    # Orthogonal directions agree about as often as any two of 2 d codes: 3,200 pairs, five standard errors.
    assert abs(float(hit[1]) - 1 / 64) < 5 * math.sqrt(1 / 64 / 3200)
    assert analysis.asymptotic_hit(torch.tensor([1.0, -1.0]), 32).tolist() == [1, 0]
    # tau^2 = 1 at q.k = 1/2: p = d^(-1/3).
    assert float(analysis.asymptotic_hit(torch.tensor(0.5), 27)) == pytest.approx(1 / 3)
    assert float(any_round(torch.tensor(0.5), 3)) == pytest.approx(7 / 8)


def test_entry_errors_are_the_definitions():
    dots = torch.tensor([0.5])
    found = analysis.entry_errors(dots, torch.tensor([0.25]), 10)
    variance = (math.exp(3) - 1) * math.exp(1) / 10
    assert float(found["performer"]) == pytest.approx(variance)
    assert float(found["scatterbrain"]) == pytest.approx(0.75 * variance)
    assert float(found["reformer"]) == pytest.approx(0.75 * math.e)


def test_tight_orthogonal_clusters_are_in_the_class_and_loose_ones_are_not():
    label = torch.arange(40) // 4
    centres = torch.eye(10, 64, dtype=torch.float64)[label]
    noise = torch.randn(40, 64, generator=generator(), dtype=torch.float64)
    tight = analysis.membership(centres + 1e-3 * noise, label, 0.3)
    assert tight.holds and tight.block_share == 0.1 and tight.within == tight.across == 1
    assert not analysis.membership(centres + 0.3 * noise, label, 0.3).holds


def test_parameters_that_a_diagonal_plus_ones_needs():
    """M = 7 I + J: rank one and a diagonal are exact; n - 1 equal singular values resist a low rank; all entries resist a sparse one."""
    n = 32
    matrix = 7 * torch.eye(n, dtype=torch.float64) + 1
    found = analysis.needs(matrix, 0.5, 7.0)
    assert found.both == n * 2 and found.both_error < 1e-9
    assert found.low_rank == n * n and found.sparse == n * n
    # An error of 7 may drop one of the equal singular values; 49 of the ones.
    found = analysis.needs(matrix, 7.001, 7.0)
    assert found.low_rank == n * (n - 1) and found.sparse == n * n - 49


def test_errors_by_kind_of_a_block_diagonal_matrix():
    blocks = torch.block_diag(*[torch.ones(4, 4, dtype=torch.float64)] * 16)
    found = analysis.kind_errors(blocks, 8)
    assert found.sparse == 0 and found.both == 0
    assert found.low_rank == pytest.approx(math.sqrt(12 * 16))  # rank 4 of 16 equal values 4


@pytest.mark.parametrize(("reach", "error"), [(1.0, 0.1), (5.0, 0.01), (20.0, 0.01)])
def test_the_taylor_polynomial_of_that_degree_and_no_lower_one_is_close(reach, error):
    degree = analysis.taylor_degree(reach, error)
    gap = [abs(math.exp(reach) - math.fsum(reach**i / math.factorial(i) for i in range(d + 1))) for d in (degree - 1, degree)]
    assert gap[1] <= error < gap[0]


def test_sign_matrices_have_the_examples_norms():
    q = analysis.sign_matrix(20, 50, 3.0, generator())
    assert torch.allclose(q.square().sum(-1), torch.full((20,), 3.0, dtype=torch.float64))
    assert analysis.largest_overlap(torch.tensor([[1.0, 0.0], [0.6, 0.8]])) == pytest.approx(0.6)


def test_branches_sum_to_the_references_weights():
    q, k = torch.randn(2, 1, 3, 64, 16, generator=generator())
    for method in (sb.presets.scatterbrain(24), {"budget": 0.25}, sb.presets.long_short(24)):
        found = analysis.branches(q, k, **method)
        _, weights = sb.attention(q, k, k, impl="reference", return_weights=True, **method)
        assert torch.allclose(found.got, weights, atol=1e-5)
        assert torch.allclose(found.got.sum(-1), torch.ones(1, 3, 64), atol=1e-5)
        assert ((found.sparse != 0) <= found.support).all() and not (found.low_rank[found.support] != 0).any()
        assert torch.allclose(found.due, (found.exact * ~found.support).sum(-1), atol=1e-6)


def test_branches_of_exact_attention_and_of_no_support():
    q = torch.randn(1, 2, 32, 8, generator=generator())
    whole = analysis.branches(q, q, causal=True, **sb.presets.softmax())
    assert whole.error.max() < 1e-5 and whole.carried.max() == 0
    none = analysis.branches(q, q, **sb.presets.performer(16))
    assert not none.support.any() and torch.allclose(none.carried, torch.ones(1, 2, 32), atol=1e-5)
    with pytest.raises(ValueError, match="double_count must be False"):
        analysis.branches(q, q, **sb.presets.naive_sum(16))


def test_public_names_exist():
    assert all(hasattr(analysis, name) for name in analysis.__all__)
