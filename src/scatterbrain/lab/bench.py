"""`scatterbrain bench`: time, memory and error of attention against length, ours beside exact attention and other packages."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..errors import require, require_int
from ..functional import check_impl
from . import bench_table, machine
from .bench_figures import draw
from .cases import DATA, Case, cases, lengths, not_causal
from .contenders import ENTRIES, EXACT, OURS, Contender, Shape
from .contest import Contest, Effort
from .extras import LabError, need
from .packages import PACKAGES
from .peak import Scales
from .record import BOTH, FORWARD, Record, Skip, load, start

CONTENDERS: dict[str, Contender] = {one.name: one for one in (*EXACT, *OURS, *PACKAGES)}
DTYPES = ("float32", "bfloat16")
CORE = ("torch", "numpy", "transformers", "matplotlib")
USED = (*CORE, "performer-pytorch", "reformer-pytorch", "nystrom-attention", "linear-attention-transformer", "routing-transformer")
FIRST = "normal"  # the input whose backward pass and memory are measured


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure. `threads` None leaves torch's own number; `longest` is what one call may take, in seconds."""

    lengths: tuple[int, ...] = tuple(n for n in ENTRIES if n <= 32768)
    data: tuple[str, ...] = DATA
    methods: tuple[str, ...] = tuple(CONTENDERS)
    heads: int = 8
    width: int = 64
    causal: bool = False
    dtype: str = "float32"
    impl: str = "auto"
    backward: bool = True
    memory: bool = True
    repeats: int = 7
    longest: float = 60.0
    threads: int | None = None
    seed: int = 0
    out: str = "bench"

    def __post_init__(self) -> None:
        for name, known in (("data", DATA), ("methods", tuple(CONTENDERS))):
            given = getattr(self, name)
            require(bool(given) and set(given) <= set(known), name, f"name some of {', '.join(known)}", given, "pass one or more of them")
        require(bool(self.lengths), "lengths", "name a length", self.lengths, "pass one or more, such as 1024")
        for length in self.lengths:
            require_int(length, "lengths", least=16)
        require("sdpa" in self.methods, "methods", "have sdpa among them", self.methods, "add it: every ratio is to it")
        require(self.dtype in DTYPES, "dtype", f"be one of {', '.join(DTYPES)}", self.dtype, "pick one of them")
        for name in ("heads", "width", "repeats"):
            require_int(getattr(self, name), name)
        require(0 < self.longest < math.inf, "longest", "be positive and finite", self.longest, "pass the seconds that one call may take, such as 60")
        if self.threads is not None:
            require_int(self.threads, "threads")
        require_int(self.seed, "seed", least=0)
        check_impl(self.impl, False)


QUICK: dict[str, Any] = {
    "lengths": (512, 1024, 2048),
    "data": ("normal", "whisper"),
    "methods": (
        "sdpa",
        "naive",
        "default",
        "smyrf+performer",
        "window+performer",
        "performer",
        "performer-pytorch",
        "nystrom-attention",
        "longformer",
    ),
    "backward": False,
    "repeats": 3,
    "longest": 5.0,
}


def run(config: BenchConfig, command: str = "", fresh: bool = False) -> dict[str, Path]:
    """Measure, or go on with a record that was stopped; print the table, draw the figures; returns where they are."""
    # Missing packages are said before the work, not after it.
    tqdm = need("tqdm", "bench").tqdm
    need("matplotlib", "bench")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    path = Path(config.out) / "bench.json"
    record = start(path, header(config, command), fresh)
    busy = machine.load()
    if busy > 0.5:
        print(f"{busy:.1f} other tasks run on this machine: times will suffer, and ratios with them", flush=True)
    if record.rows:
        print(f"going on with {path}: {len(record.rows)} rows are there", flush=True)
    try:
        total = sum(steps(config, data) for data in config.data)
        with closing(Scales()) as scales, tqdm(total=total, unit="step", leave=False, dynamic_ncols=True) as bar:
            for data in ordered(config):
                measure(config, data, record, scales, bar)
    except KeyboardInterrupt:
        record.save()
        raise KeyboardInterrupt(f"what was measured is in {path}; the same command goes on with it") from None
    record.complete = True
    record.save()
    return report(path)


def ordered(config: BenchConfig) -> list[str]:
    return [data for data in DATA if data in config.data]


def header(config: BenchConfig, command: str) -> dict[str, Any]:
    """As it reads from disk, so that it can be compared with an older one."""
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name != "out"}
    said = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "config": settings,
        "versions": machine.versions(USED),
        "hardware": machine.hardware(),
        "load": machine.load(),
        "seed": config.seed,
    }
    found: dict[str, Any] = json.loads(json.dumps(said))
    return found


def effort(config: BenchConfig, data: str) -> Effort:
    """The backward pass and the memory depend on the input no more than the forward pass does: once is enough."""
    passes = (FORWARD, BOTH) if config.backward and data == FIRST else (FORWARD,)
    return Effort(repeats=config.repeats, longest=config.longest, passes=passes, memory=config.memory and data == FIRST)


def steps(config: BenchConfig, data: str) -> int:
    return len(lengths(data, config.lengths)) * effort(config, data).steps(len(config.methods))


def measure(config: BenchConfig, data: str, record: Record, scales: Scales, bar: Any) -> None:
    like = Shape(
        heads=config.heads,
        kv_heads=config.heads,
        length=1,
        width=config.width,
        causal=config.causal,
        scale=config.width**-0.5,
        dtype=config.dtype,
        impl=config.impl,
        seed=config.seed,
    )
    reason = not_causal(data, config.causal)
    if reason:
        leave_out(record, data, reason)
        bar.update(steps(config, data))
        return
    contenders = [one for name, one in CONTENDERS.items() if name in config.methods]
    for length, build in cases(data, tuple(sorted(set(config.lengths))), like):
        if done(record, config, data, length):
            bar.update(effort(config, data).steps(len(contenders)))
            continue
        bar.set_description_str(f"{data} {length:,}: inputs")
        try:
            case = build()
        except (LabError, OSError) as error:
            leave_out(record, data, str(error))
            bar.update(steps(config, data))
            return
        record.about[data] = case.about
        Contest(case, contenders, effort(config, data), record, scales, ticker(bar, case)).run()


def leave_out(record: Record, data: str, reason: str) -> None:
    record.skips = [s for s in record.skips if (s.data, s.method) != (data, "all")]
    record.skip(Skip(data=data, length=None, method="all", what="all", reason=reason))


def done(record: Record, config: BenchConfig, data: str, length: int) -> bool:
    """Nothing is left to do, so that a finished case's inputs are not made again."""
    one = effort(config, data)
    for name in config.methods:
        row = record.rows.get((data, length, name))
        if row is None and not record.skipped(data, length, name, "all"):
            return False
        for what in one.passes if row else ():
            weighed = not one.memory or row.peak(what) is not None or record.skipped(data, length, name, "memory")  # type: ignore[union-attr]
            if not record.skipped(data, length, name, what) and (len(getattr(row, what)) < one.repeats or not weighed):
                return False
    return True


def ticker(bar: Any, case: Case) -> Callable[[str, str, int], None]:
    def tick(label: str, what: str, count: int) -> None:
        bar.set_description_str(f"{case.data} {case.shape.length:,}: {label}, {what.replace('_', ' + ')}", refresh=False)
        bar.update(count)

    return tick


def report(path: Path) -> dict[str, Path]:
    """The table and the figures of a saved record; raises where a result was refused."""
    record = load(path)
    print(bench_table.format_record(record))
    paths = {"record": path, **draw(record, path.parent)}
    print()
    for name, where in paths.items():
        print(f"{name:<7} {where}")
    sys.stdout.flush()
    wrong = [f"{s.method} on {s.data} at {s.length:,}" for s in record.skips if s.wrong]
    if wrong:
        raise LabError(f"{len(wrong)} wrong results were refused, not timed: {', '.join(wrong)}; the record says why")
    return paths
