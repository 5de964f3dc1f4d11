"""One case of the benchmark: who takes part, how wrong each is, what memory each takes, and the times, in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import machine
from .cases import Case
from .check import WrongResult, against_torch, check
from .contenders import Contender, Forward, Shape, settle
from .packages import missing
from .peak import DidNotFit, Scales, measurable
from .record import BOTH, FORWARD, Record, Row, Skip
from .timing import Call, call, rounds
from .truth import Truth, exact, matrix_error, output_error

Tick = Callable[[str, str, int], None]
SPARE = 0.8  # of the free memory may be asked for
PATIENCE = 4  # a fresh process may take so many times the longest call


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to measure of a case."""

    repeats: int
    longest: float
    passes: tuple[str, ...] = (FORWARD, BOTH)
    memory: bool = True

    def steps(self, contenders: int) -> int:
        return contenders * (1 + len(self.passes) * (self.memory + self.repeats))


class Contest:
    """All contenders on one case. `tick` hears the contender, what was done and how many steps that were."""

    def __init__(self, case: Case, contenders: Sequence[Contender], effort: Effort, record: Record, scales: Scales, tick: Tick) -> None:
        self.case, self.contenders, self.effort = case, contenders, effort
        self.record, self.scales, self.tick = record, scales, tick
        self.truth: Truth | None = None
        self.built: dict[str, Forward] = {}
        self.fed: dict[bool, tuple[Tensor, ...]] = {}

    def run(self) -> None:
        for contender in self.contenders:
            if not self.left_out(contender, "all") and not self.row(contender):
                self.enter(contender)
            self.tick(contender.label, "error", 1)
        self.truth = None
        for what in self.effort.passes:
            if self.effort.memory:
                self.weigh(what)
            self.time(what)

    def row(self, contender: Contender) -> Row | None:
        return self.record.rows.get((self.case.data, self.case.shape.length, contender.name))

    def left_out(self, contender: Contender, what: str) -> bool:
        """Skipped before, or now for a reason that is known beforehand."""
        data, length = self.case.data, self.case.shape.length
        if self.record.skipped(data, length, contender.name, what):
            return True
        reason = self.reason(contender, what)
        if reason:
            self.skip(contender, what, reason)
        return bool(reason)

    def skip(self, contender: Contender, what: str, reason: str, wrong: bool = False) -> None:
        text = " ".join(reason.split())
        self.record.skip(Skip(data=self.case.data, length=self.case.shape.length, method=contender.name, what=what, reason=text, wrong=wrong))

    def reason(self, contender: Contender, what: str) -> str:
        shape = self.case.shape
        said = missing(contender) or contender.refuses(shape) if what == "all" else ""
        return said or self.too_much(contender, shape, what) or self.too_long(contender, shape, what)

    def too_much(self, contender: Contender, shape: Shape, what: str) -> str:
        free = machine.memory()
        part = FORWARD if what == "all" else what
        if contender.bytes is not None:
            needed = contender.bytes(shape, part == BOTH)
        else:
            peaks = [(row.length, row.peak(part)) for row in self.record.before(self.case.data, shape.length, contender.name)]
            needed = next((round(size * shape.length / length) for length, size in peaks if size), 0)
        if free is None or needed <= SPARE * free:
            return ""
        return f"would need about {needed / 2**30:.1f} GiB of {free / 2**30:.1f} GiB free"

    def too_long(self, contender: Contender, shape: Shape, what: str) -> str:
        """From the last length's time: as its square for exact attention, for the others as length x entries."""
        part = FORWARD if what == "all" else what
        for row in self.record.before(self.case.data, shape.length, contender.name):
            seconds, ratio = row.seconds(part), shape.length / row.length
            if seconds is not None:
                entries = shape.entries / max(1, Shape(**row.shape).entries)
                guess = seconds * ratio**contender.growth * (entries if contender.growth == 1 else 1)
                return f"would take about {guess:,.0f} s, over {self.effort.longest:g} s" if guess > self.effort.longest else ""
        shorter = [s for s in self.record.skips if (s.data, s.method, s.what) == (self.case.data, contender.name, part)]
        if any(s.length is not None and s.length < shape.length and "took " in s.reason for s in shorter):
            return f"took over {self.effort.longest:g} s at a smaller length"
        return ""

    def enter(self, contender: Contender) -> None:
        """Its row, with its errors; or a skip that says why there is none."""
        try:
            self.record.put(self.errors(contender))
        except WrongResult as error:
            self.skip(contender, "all", f"refused: {error}", wrong=True)
        except (ValueError, RuntimeError, TypeError, NotImplementedError, AssertionError, ImportError, IndexError) as error:
            # What a package or an implementation cannot do, it says in one of these.
            self.skip(contender, "all", f"{type(error).__name__}: {str(error)[:300] or 'no message'}")

    def errors(self, contender: Contender) -> Row:
        case, shape = self.case, self.case.shape
        spent: dict[str, Any] = {"entries": contender.entries(shape), "impl": contender.kind, "flop_ratio": None}
        if contender.kind == "ours":
            shape, found = settle(contender, shape, case.q, case.k, case.v)
            case = dataclasses.replace(case, shape=shape)
            spent = {"entries": found.entries_sparse + found.entries_low_rank, "impl": found.impl, "flop_ratio": found.flops_full / found.flops}
        forward = contender.build(shape)
        agreement, own, matrix, spread, other = check(contender, case, forward), None, None, None, None
        if contender.compared:
            self.truth = self.truth or exact(case)
            with torch.no_grad():
                own = output_error(forward(*contender.feed(shape, case.q, case.k, case.v)), self.truth)
            if contender.kind == "ours" and shape.impl != "torch":
                other = against_torch(contender, case, forward, own)
            # Exact methods have rounding alone.
            if contender.kind != "exact":
                matrix, spread = matrix_error(contender, forward, case, self.truth)
            elif own > 1e-2:
                raise WrongResult(f"{contender.name} must be softmax attention; its error is {own:.2g}")
        return Row(
            data=case.data,
            length=shape.length,
            method=contender.name,
            label=contender.label,
            kind=contender.kind,
            shape=dataclasses.asdict(shape),
            budget=spent["entries"] / shape.visible,
            output_error=own,
            matrix_error=matrix,
            matrix_spread=spread,
            agreement=agreement,
            agreement_torch=other,
            note=contender.note,
            **spent,
        )

    def weigh(self, what: str) -> None:
        """Peak memory, one process after the other."""
        for contender in self.contenders:
            row = self.row(contender)
            if row and row.peak(what) is None and not self.left_out(contender, what):
                self.weigh_one(contender, row, what)
            self.tick(contender.label, "memory", 1)

    def weigh_one(self, contender: Contender, row: Row, what: str) -> None:
        if self.record.skipped(row.data, row.length, row.method, "memory"):
            return
        if not measurable():
            self.skip(contender, "memory", "needs Linux's /proc to reset the peak of resident memory")
            return
        try:
            size = self.scales.peak(contender, Shape(**row.shape), what == BOTH, PATIENCE * self.effort.longest)
            self.record.put(row.having(f"peak_{what}", size))
        except DidNotFit as error:
            self.skip(contender, what, str(error))

    def time(self, what: str) -> None:
        calls: dict[str, Call] = {}
        for contender in self.contenders:
            row = self.row(contender)
            if row and len(getattr(row, what)) < self.effort.repeats and not self.left_out(contender, what):
                one = self.call(contender, Shape(**row.shape), what == BOTH)
                if self.first(contender, one, what):
                    calls[contender.name] = one
                    continue
            self.tick(contender.label, what, self.effort.repeats)
        counts = {name: len(getattr(self.record.rows[self.case.data, self.case.shape.length, name], what)) for name in calls}
        rounds(calls, counts, self.effort.repeats, lambda name, seconds: self.heard(name, what, seconds))

    def first(self, contender: Contender, one: Call, what: str) -> bool:
        """To warm up: the first call is not counted. False where it fails or takes too long."""
        try:
            took = one()
        except (ValueError, RuntimeError, NotImplementedError) as error:
            self.skip(contender, what, f"{type(error).__name__}: {str(error)[:300]}")
            return False
        if took > self.effort.longest:
            self.skip(contender, what, f"took {took:,.0f} s, over {self.effort.longest:g} s")
            return False
        return True

    def heard(self, name: str, what: str, seconds: float) -> None:
        row = self.record.rows[self.case.data, self.case.shape.length, name]
        self.record.put(row.having(what, (*getattr(row, what), seconds)))
        self.tick(row.label, what, 1)

    def call(self, contender: Contender, shape: Shape, backward: bool) -> Call:
        return call(self.build(contender, shape), self.inputs(contender), backward)

    def build(self, contender: Contender, shape: Shape) -> Forward:
        if contender.name not in self.built:
            self.built[contender.name] = contender.build(shape)
        return self.built[contender.name]

    def inputs(self, contender: Contender) -> tuple[Tensor, ...]:
        """Other packages share one scaled copy."""
        package = contender.kind == "package"
        if package not in self.fed:
            self.fed[package] = contender.feed(self.case.shape, self.case.q, self.case.k, self.case.v)
        return self.fed[package]
