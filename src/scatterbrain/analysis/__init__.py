"""Why sparse, low-rank or both fit an attention matrix: oracles, statistics, and the paper's theory as measurements."""

from .branches import Branches, branches, exact, support_mask, weights
from .checks import check_attention, check_budget, check_matrix
from .estimators import asymptotic_hit, entry_errors, measured_hits, performer_moments, performer_variance, scatterbrain_moments
from .oracles import Mixes, Split, low_rank_errors, mixes, rank_cost, rank_for, relative_error, sparse_errors, sparse_low_rank, top_k, truncated_svd
from .robust_pca import Pursuit, at_budget, robust_pca
from .statistics import Correlation, Exponent, correlations, entropy, exponent
from .theory import kind_errors, largest_overlap, membership, needs, sign_matrix, symmetric_tail, taylor_degree

__all__ = [
    "Branches",
    "Correlation",
    "Exponent",
    "Mixes",
    "Pursuit",
    "Split",
    "asymptotic_hit",
    "at_budget",
    "branches",
    "check_attention",
    "check_budget",
    "check_matrix",
    "correlations",
    "entropy",
    "entry_errors",
    "exact",
    "exponent",
    "kind_errors",
    "largest_overlap",
    "low_rank_errors",
    "measured_hits",
    "membership",
    "mixes",
    "needs",
    "performer_moments",
    "performer_variance",
    "rank_cost",
    "rank_for",
    "relative_error",
    "robust_pca",
    "scatterbrain_moments",
    "sign_matrix",
    "sparse_errors",
    "sparse_low_rank",
    "support_mask",
    "symmetric_tail",
    "taylor_degree",
    "top_k",
    "truncated_svd",
    "weights",
]
