"""How much the model cares: one backward pass says what an error of a head's output does to what the model says.

For a random g with E[g g'] = J' F J, where J is the derivative of the model's output by a head's and F how outputs are compared,
E[(g.e)^2] is the size of what an error e makes of the output. With logits, F is Fisher's information: labels are drawn from the
model's own distribution, g is the gradient of their negative log likelihood, and half the sum of (g.e)^2 is the divergence that e
causes, to second order. Any other output is compared by its squares, with random signs. A row's error of weights, w - a, is one
of the output of sum_j (w - a)_ij v_j, so that g.e costs a number a pair, g_i.v_j: `harm` of trial.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import require

Loss = Callable[[Any, Any], Tensor]
LOGITS_AT_ONCE = 2**26


def probe(output: Any, generator: torch.Generator) -> Tensor:
    """A random scalar of a model's output, whose gradients say what the output feels."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor) and logits.dim() >= 2:
        return _likelihood(logits.flatten(0, -2), generator)
    found = main_tensor(output)
    require(found is not None, "model", "return a tensor, or an output that holds one", type(output).__name__, "pass objective='matrix', or a loss")
    assert found is not None
    sign = torch.randint(2, found.shape, generator=generator).to(found) * 2 - 1
    return (found * sign).sum() / found.detach().square().sum().sqrt().clamp(min=1e-30)


def _likelihood(logits: Tensor, generator: torch.Generator) -> Tensor:
    """The mean over rows of a label's negative log likelihood, labels drawn from the logits themselves; times the root of the
    number of rows, so that squares add up to a mean over rows."""
    parts = []
    for part in logits.split(max(1, LOGITS_AT_ONCE // max(1, logits.shape[-1]))):
        with torch.no_grad():
            chance = torch.softmax(part.detach().float(), -1).cpu()
            label = torch.multinomial(chance, 1, generator=generator)[:, 0].to(part.device)
        parts.append(F.cross_entropy(part.float(), label, reduction="sum"))
    return torch.stack(parts).sum() / logits.shape[0] ** 0.5


def main_tensor(output: Any) -> Tensor | None:
    """The first tensor of real numbers in what a model returns."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return next((t for value in values if (t := main_tensor(value)) is not None), None)
