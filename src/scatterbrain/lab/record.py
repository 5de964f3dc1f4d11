"""The benchmark's record: rows that fill as measurements come, on disk after each, so that a stopped run goes on where it was."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import require

FORMAT = 1
FORWARD, BOTH = "forward", "forward_backward"
Key = tuple[str, int, str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender on one case. entries and budget are those spent; peaks are bytes beyond the inputs; errors are None where not defined.

    matrix_spread is the standard error of an estimated matrix_error. flop_ratio is exact attention's FLOPs over the method's.
    """

    data: str
    length: int
    method: str
    label: str
    kind: str
    shape: dict[str, Any]
    impl: str
    entries: float
    budget: float
    flop_ratio: float | None
    output_error: float | None
    matrix_error: float | None
    matrix_spread: float | None
    agreement: float | None
    agreement_torch: float | None
    note: str = ""
    forward: tuple[float, ...] = ()
    forward_backward: tuple[float, ...] = ()
    peak_forward: int | None = None
    peak_forward_backward: int | None = None

    @property
    def key(self) -> Key:
        return self.data, self.length, self.method

    def seconds(self, what: str = FORWARD) -> float | None:
        """The median."""
        times = getattr(self, what)
        return statistics.median(times) if times else None

    def peak(self, what: str = FORWARD) -> int | None:
        found: int | None = getattr(self, f"peak_{what}")
        return found

    def having(self, name: str, value: Any) -> Row:
        changes: dict[str, Any] = {name: value}
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        medians = {f"{what}_median": self.seconds(what) for what in (FORWARD, BOTH)}
        least = {f"{what}_least": min(getattr(self, what), default=None) for what in (FORWARD, BOTH)}
        return {**dataclasses.asdict(self), **medians, **least}


@dataclass(frozen=True, kw_only=True)
class Skip:
    """What was not measured, and why. `what` is all, forward, forward_backward or memory; `wrong` marks a refused result."""

    data: str
    length: int | None
    method: str
    what: str
    reason: str
    wrong: bool = False


@dataclass(kw_only=True)
class Record:
    """`header` says what was measured on what; a record goes on only under the same one."""

    path: Path
    header: dict[str, Any]
    about: dict[str, str] = field(default_factory=dict)
    rows: dict[Key, Row] = field(default_factory=dict)
    skips: list[Skip] = field(default_factory=list)
    complete: bool = False

    def put(self, row: Row) -> None:
        self.rows[row.key] = row
        self.save()

    def skip(self, skip: Skip) -> None:
        self.skips.append(skip)
        self.save()

    def skipped(self, data: str, length: int, method: str, what: str) -> bool:
        return any((s.data, s.length, s.method) == (data, length, method) and s.what in ("all", what) for s in self.skips)

    def before(self, data: str, length: int, method: str) -> list[Row]:
        """The same method's rows at smaller lengths, the longest first."""
        found = [row for row in self.rows.values() if (row.data, row.method) == (data, method) and row.length < length]
        return sorted(found, key=lambda row: -row.length)

    def to_dict(self) -> dict[str, Any]:
        body = {"complete": self.complete, "inputs": self.about, "rows": [row.to_dict() for row in self.rows.values()]}
        return {"type": "scatterbrain-bench", "version": FORMAT, **self.header, **body, "skips": [dataclasses.asdict(s) for s in self.skips]}

    def save(self) -> None:
        """Written beside and renamed, so that a stop at any moment leaves a whole record."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)


def load(path: Path) -> Record:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        found = {}
    ours = isinstance(found, dict) and (found.get("type"), found.get("version")) == ("scatterbrain-bench", FORMAT)
    require(ours, str(path), f"be a benchmark's record of version {FORMAT}", "something else", "pass another --out, or --fresh")
    rows = [_row(row) for row in found["rows"]]
    body = ("type", "version", "complete", "inputs", "rows", "skips")
    return Record(
        path=path,
        header={k: v for k, v in found.items() if k not in body},
        about=found["inputs"],
        rows={row.key: row for row in rows},
        skips=[Skip(**skip) for skip in found["skips"]],
        complete=found["complete"],
    )


def _row(saved: dict[str, Any]) -> Row:
    known = {f.name for f in dataclasses.fields(Row)}
    fields: dict[str, Any] = {name: tuple(value) if name in (FORWARD, BOTH) else value for name, value in saved.items() if name in known}
    return Row(**fields)


def start(path: Path, header: dict[str, Any], fresh: bool) -> Record:
    """A new record, or the one at `path` if it was begun with the same settings on the same machine and software."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if fresh or not path.exists():
        return Record(path=path, header=header)
    old = load(path)
    same = ("config", "versions", "hardware")
    differ = [f"{part}.{name}" for part in same for name in header[part] if header[part][name] != old.header[part].get(name)]
    rule = "hold a run with the same settings, machine and software, to go on with it"
    require(not differ, str(path), rule, f"others ({', '.join(differ)})", "pass another --out, or --fresh to start over")
    return old
