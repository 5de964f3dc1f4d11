"""`scatterbrain quality`: what a user of a converted model notices, ours beside every baseline at the same budget."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from ..calibration.calibrate import calibrate
from ..calibration.plan import Plan, aligned
from ..errors import require
from ..integrations.convert import convert, restore
from .extras import need
from .models import cache_folder
from .rivals import BOTH_WAYS, Named
from .rows import Rows, check_common, in_unit
from .subjects import CARRIED, Subject, calibration_inputs, load
from .tasks import TASKS, Task

KIND = "scatterbrain-quality"
EXACT, OURS = "exact", "ours (calibrated)"
METHODS = (EXACT, OURS, *BOTH_WAYS)
SHOWN = {
    "retrieval": ("cosine", "cosine_least", "top1"),
    "transcript": ("wrong_words", "the_same"),
    "perplexity 2,048": ("perplexity",),
    "perplexity 8,192": ("perplexity",),
    "generation": ("same_first", "same_until", "whole"),
}


@dataclass(frozen=True, kw_only=True)
class QualityConfig:
    """What to measure. `tasks` None means all of a model's; an existing record goes on where it was unless `fresh`."""

    data: tuple[str, ...] = CARRIED
    budget: float = 1 / 8
    methods: tuple[str, ...] = METHODS
    tasks: tuple[str, ...] | None = None
    policy: str = "measured"
    plans: str | None = None
    seed: int = 0
    threads: int | None = None
    out: str = "records/quality.json"
    fresh: bool = False

    def __post_init__(self) -> None:
        check_common(self.data, self.methods, METHODS)
        require(in_unit(self.budget), "budget", "lie in (0, 1]", self.budget, "pass the share of entries to spend, such as 1/8")
        known = {task for tasks in TASKS.values() for task in tasks}
        require(set(self.tasks or ()) <= known, "tasks", f"name some of {', '.join(sorted(known))}", self.tasks, "pick among them")


def run(config: QualityConfig, command: str = "") -> Path:
    """Measure what the record lacks, print the tables; returns where the record is."""
    need("tqdm", "bench")
    rows = Rows.open(KIND, ("model", "budget", "method", "task"), config, command)
    for name in config.data:
        measure(config, name, rows)
    print("\n\n".join(table(rows.rows, name, config.budget) for name in config.data))
    print(f"\nrecord  {config.out}")
    return rows.path


def measure(config: QualityConfig, name: str, rows: Rows) -> None:
    wanted = [task for task in TASKS[name] if config.tasks is None or task in config.tasks]
    open_rows = [(m, t) for t in wanted for m in config.methods if not rows.find(model=name, budget=config.budget, method=m, task=t)]
    if not open_rows:
        return
    subject = load(name)
    ours = Ours(subject, config.budget, config.plans, config.policy, config.seed)
    for task_name in wanted:
        todo = [method for method, task in open_rows if task == task_name]
        if not todo:
            continue
        task = TASKS[name][task_name](subject)
        known = EXACT not in todo and recall(task, name, task_name)
        for method in [*([] if known else [EXACT]), *(method for method in todo if method != EXACT)]:
            print(f"{subject.title}, {task_name}: {method}", flush=True)
            row = one(config, subject, method, task, ours)
            about = {"model": name, "budget": config.budget, "method": method, "task": task_name, "inputs": task.about}
            rows.put({**about, **row})
            if method == EXACT:
                torch.save({"about": task.about, "seconds": task.seconds, "exact": task.exact}, said_by_exact(name, task_name))


def said_by_exact(name: str, task_name: str) -> Path:
    """Kept in the cache, so that a run that goes on need not begin with it again."""
    folder = cache_folder() / "quality"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}-{task_name.replace(' ', '-').replace(',', '')}.pt"


def recall(task: Task, name: str, task_name: str) -> bool:
    path = said_by_exact(name, task_name)
    found = torch.load(path, weights_only=True) if path.is_file() else {}
    if found.get("about") != task.about:
        return False
    task.exact, task.seconds = found["exact"], found["seconds"]
    return True


@dataclass
class Ours:
    """Our plan, made when first asked for, or read from the folder of plans."""

    subject: Subject
    budget: float
    plans: str | None = None
    policy: str = "measured"
    seed: int = 0
    made: Plan | None = None

    def plan(self) -> Plan:
        if self.made is None:
            name = f"{self.subject.name}-{Fraction(self.budget).limit_denominator(1024)}.json".replace("/", "_")
            path = Path(self.plans) / name if self.plans else None
            if path is not None and path.is_file():
                self.made = Plan.load(path)
            else:
                inputs, about = calibration_inputs(self.subject)
                self.made = calibrate(self.subject.part, inputs, self.budget, policy=self.policy, seed=self.seed)
                self.made = dataclasses.replace(self.made, about={**self.made.about, "text": about})
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self.made.save(path)
        return self.made


def one(config: QualityConfig, subject: Subject, method: str, task: Task, ours: Ours) -> dict[str, Any]:
    """A row: what the task says, seconds, or why the method cannot take part."""
    if method == EXACT:
        found, seconds = task.measure()
        return {"result": found, "seconds": seconds, "note": ""}
    if method != OURS and (why := Named(method, config.budget).refusal(subject.causal)):
        return {"result": None, "seconds": None, "note": f"not causal: {why}"}
    plan: Any = ours.plan() if method == OURS else Named(method, config.budget)
    convert(subject.part, plan)
    try:
        found, seconds = task.measure()
    finally:
        restore(subject.part)
    return {"result": found, "seconds": seconds, "note": ""}


def table(rows: list[dict[str, Any]], model: str, budget: float) -> str:
    """One block a model: a line a method, the tasks side by side."""
    mine = [row for row in rows if row["model"] == model and row["budget"] == budget]
    tasks = [task for task in TASKS[model] if any(row["task"] == task for row in mine)]
    heads = [f"{task}: {name.replace('_', ' ')}" for task in tasks for name in (*SHOWN[task], "seconds")]
    lines: list[tuple[str, ...]] = [("method", *heads)]
    for method in METHODS:
        cells: list[str] = []
        for task in tasks:
            row = next((row for row in mine if row["method"] == method and row["task"] == task), None)
            cells += cells_of(row, task)
        if any(cells):
            lines.append((method, *cells))
    inputs = "; ".join(dict.fromkeys(row["inputs"] for row in mine))
    return "\n".join([f"{model} at budget {budget:g} ({inputs})", *aligned(lines, right=tuple(range(1, len(heads) + 1)))])


def cells_of(row: dict[str, Any] | None, task: str) -> list[str]:
    names = SHOWN[task]
    if row is None:
        return [""] * (len(names) + 1)
    if row["result"] is None:
        return ["not causal", *[""] * len(names)]
    return [*(written(row["result"][name]) for name in names), f"{row['seconds']:.1f}"]


def written(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else "inf" if not math.isfinite(value) else f"{value:,.4g}"
