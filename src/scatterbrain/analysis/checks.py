"""What an analysis is given, checked: a matrix of attention, and a budget that buys something."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import require

ROWS_TOLERANCE = 1e-3  # half precision attention is this far from one


def check_matrix(matrix: Any, name: str = "matrix") -> Tensor:
    """A floating (..., N, M) tensor of finite numbers."""
    require(isinstance(matrix, Tensor), name, "be a tensor", type(matrix).__name__, "pass a torch.Tensor")
    shape = tuple(matrix.shape)
    require(matrix.dim() >= 2 and 0 not in shape, name, "have shape (..., N, M), none of them 0", shape, "pass at least one matrix")
    require(matrix.is_floating_point(), name, "hold floating-point numbers", matrix.dtype, f"cast it with {name}.float()")
    bad = int((~torch.isfinite(matrix)).sum())
    require(bad == 0, name, "hold finite numbers", f"{bad} that are not (NaN or infinite)", "look at the layer that made it")
    return matrix


def check_attention(matrix: Any, name: str = "attention") -> Tensor:
    """Rows that are distributions; a row whose keys are all masked may be zero."""
    matrix = check_matrix(matrix, name)
    least = float(matrix.min())
    require(least >= -ROWS_TOLERANCE, name, "hold no negative weight", f"{least:.3g}", "pass softmax's output, not its input")
    total = matrix.sum(-1)
    off = torch.where(total == 0, 0.0, (total - 1).abs())
    worst = int(off.argmax())
    said = f"a sum of {float(total.flatten()[worst]):.4g} in row {worst % total.shape[-1]}"
    require(float(off.max()) <= ROWS_TOLERANCE, name, "have rows that sum to one", said, "divide each row by its sum, or pass softmax's output")
    return matrix


def check_budget(budget: Any, keys: float) -> float:
    """Entries a row for a share of the keys."""
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool) and math.isfinite(budget)
    require(number and 0 < budget <= 1, "budget", "lie in (0, 1]", budget, "pass the share of entries to spend, such as 0.125")
    entries = budget * keys
    require(entries >= 1, "budget", "buy at least one entry a row", f"{entries:.3g} ({budget:g} of {keys:g} keys)", f"pass {1 / keys:.3g} or more")
    return float(entries)
