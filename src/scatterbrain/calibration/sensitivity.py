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


def probe(output: Any, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
    """A random scalar of a model's output, whose gradients say what the output feels. mask (B, N) leaves out rows of padding.

    Squares of (g.e) are means over an input's rows, or relative to the mean square of an input's output, whatever the batch.
    """
    logits = getattr(output, "logits", None)
    scores = isinstance(logits, Tensor) and logits.dim() in (2, 3) and logits.shape[-1] > 1
    found = logits if scores else main_tensor(output)
    require(found is not None, "model", "return a tensor, or an output that holds one", type(output).__name__, "pass objective='matrix', or a loss")
    assert found is not None
    live = torch.ones(found.shape[:-1], dtype=torch.bool, device=found.device)
    if mask is not None and found.dim() > 2 and mask.shape == found.shape[:2]:
        live = live & mask.to(found.device, torch.bool).view(*mask.shape, *[1] * (found.dim() - 3))
    items = found.shape[0] if found.dim() > 1 else 1
    if scores:
        return _likelihood(found[live], generator) * (items / max(1, int(live.sum()))) ** 0.5
    sign = torch.randint(2, found.shape, generator=generator).to(found.device) * 2 - 1
    size = found.detach().float()[live].square().sum().sqrt().clamp(min=1e-30)  # half precision would overflow
    return (found.float() * sign * live[..., None]).sum() * (items**0.5 / size)


def feeling(seed: int) -> Loss:
    """`probe` with numbers of its own, as `capture` takes it: of an output and the batch it came from."""
    generator = torch.Generator().manual_seed(seed)
    return lambda output, batch: probe(output, generator, padding_of(batch))


def _likelihood(logits: Tensor, generator: torch.Generator) -> Tensor:
    """The negative log likelihood of labels drawn from the logits (rows, classes) themselves, in all."""
    parts = []
    for part in logits.split(max(1, LOGITS_AT_ONCE // max(1, logits.shape[-1]))):
        with torch.no_grad():
            chance = torch.softmax(part.detach().float(), -1).cpu()
            label = torch.multinomial(chance, 1, generator=generator)[:, 0].to(part.device)
        parts.append(F.cross_entropy(part.float(), label, reduction="sum"))
    return torch.stack(parts).sum()


def padding_of(batch: Any) -> Tensor | None:
    """(B, N) of a batch in the manner of transformers, where it says what is padding."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def main_tensor(output: Any) -> Tensor | None:
    """The first tensor of real numbers in what a model returns."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return next((t for value in values if (t := main_tensor(value)) is not None), None)
