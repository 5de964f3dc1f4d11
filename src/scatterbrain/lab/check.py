"""Whether a contender computes what it says, before it is timed."""

from __future__ import annotations

import dataclasses

import torch

from ..errors import require
from .cases import Case
from .contenders import Contender, Forward, attend
from .measure import AGREE, CHECKED, from_reference, head_errors

AGREE_HALF = 1e-2  # bfloat16 rounds each weight and output by up to 1/256
FULL = 8192  # up to here the fast implementation is compared with torch's on the whole input


class WrongResult(ValueError):
    """It is not timed, and the run ends by saying so."""


def check(contender: Contender, case: Case, forward: Forward) -> float | None:
    """How far it is from its dense definition on the case's first tokens; None where it has none. Raises if that is too far.

    The reference holds tokens x tokens x features numbers, so it cannot take a whole long input.
    """
    require_output(contender, case, forward)
    small = first_tokens(case)
    if contender.kind == "ours":
        assert contender.method is not None
        shape, more = (
            small.shape,
            {"is_causal": small.shape.causal, "scale": small.shape.scale, "enable_gqa": case.shape.heads != case.shape.kv_heads},
        )
        method = contender.method(shape)
        worst = from_reference(attend(shape, method), small.q, small.k, small.v, **more, **method)
    elif contender.definition is not None and not contender.refuses(small.shape):
        # In float32 whatever is timed: these packages also add up in the type of their inputs.
        shape = dataclasses.replace(small.shape, dtype="float32")
        tensors = contender.feed(shape, *(t.float() for t in (small.q, small.k, small.v)))
        with torch.no_grad():
            worst = float(head_errors(contender.build(shape)(*tensors), contender.definition(shape)(*tensors)).max())
    else:
        return None
    within(contender.name, worst, "its dense definition", tolerance(case))
    return worst


def require_output(contender: Contender, case: Case, forward: Forward) -> None:
    with torch.no_grad():
        out = forward(*contender.feed(case.shape, case.q, case.k, case.v))
    expected = (*case.q.shape[:3], case.v.shape[3])
    right = tuple(out.shape) == expected and bool(out.isfinite().all())
    if not right:
        raise WrongResult(
            f"{contender.name} must return {expected} finite numbers; got shape {tuple(out.shape)}, finite: {bool(out.isfinite().all())}"
        )


def against_torch(contender: Contender, case: Case, forward: Forward, error: float) -> float | None:
    """The whole output against the torch implementation's.

    Clusters settle differently after a difference in rounding, so what is allowed grows with the method's own error.
    """
    if case.shape.length > FULL:
        return None
    assert contender.method is not None
    with torch.no_grad():
        other = attend(case.shape, contender.method(case.shape), "torch")(case.q, case.k, case.v)
        worst = float(head_errors(forward(case.q, case.k, case.v), other).mean())
    within(contender.name, worst, "impl='torch'", max(tolerance(case), error / 10))
    return worst


def tolerance(case: Case) -> float:
    return AGREE if case.shape.dtype == "float32" else AGREE_HALF


def within(name: str, worst: float, what: str, most: float) -> None:
    try:
        remedy = "report it: a result that is wrong is not timed"
        require(worst <= most, name, f"agree with {what} within {most:.2g} (relative Frobenius)", f"{worst:.2g}", remedy)
    except ValueError as error:
        raise WrongResult(str(error)) from None


def first_tokens(case: Case) -> Case:
    """A few hundred tokens of the heads that share the first key heads."""
    small = case.cut(min(CHECKED, case.shape.length), batch=1)
    shared = case.shape.heads // case.shape.kv_heads
    kv = 2 if shared == 1 and case.shape.kv_heads > 1 else 1
    q, k, v = small.q[:, : kv * shared], small.k[:, :kv], small.v[:, :kv]
    return dataclasses.replace(small, q=q, k=k, v=v, shape=dataclasses.replace(small.shape, heads=kv * shared, kv_heads=kv))
