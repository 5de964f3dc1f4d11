"""The demo's first part: a pretrained encoder calibrated, converted and compared with itself, the published pair beside it."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calibration.calibrate import calibrate
from ..calibration.capture import capture
from ..calibration.evaluate import Report, evaluate
from ..calibration.measure import Capture
from ..calibration.plan import Plan
from ..errors import require, require_int
from ..functional import attention
from ..integrations.convert import convert, restore
from . import machine, minilm
from .extras import need
from .models import data_folder
from .rivals import DEFAULT, PUBLISHED, Named
from .subjects import Subject, load
from .table import block, number
from .tasks import embed

FORMAT = 1
EXACT, OURS = "exact", "calibrated"
HEADINGS = ("method", "converted", "budget", "matrix error", "output error", "cosine", "least cosine", "time")


@dataclass(frozen=True, kw_only=True)
class ModelDemoConfig:
    """`documents` texts of 512 tokens to calibrate on and as many others to measure on."""

    budget: float = 1 / 8
    documents: int = 4
    repeats: int = 3
    threads: int | None = None
    seed: int = 0
    out: str = "demo"

    def __post_init__(self) -> None:
        require(0 < self.budget <= 1, "budget", "lie in (0, 1]", self.budget, "pass the share of entries to spend, such as 1/8")
        require_int(self.documents, "documents")
        require_int(self.repeats, "repeats")


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One way to compute the model's attention, on texts that no plan was made with."""

    method: str
    budget: float
    error: float
    output_error: float
    cosine: float
    cosine_least: float
    seconds: float
    report: Report | None = None

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "report"}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One head's weights, exact and by each method; (N, N) each."""

    title: str
    weights: dict[str, Tensor]
    errors: dict[str, float]


def run(config: ModelDemoConfig, command: str = "") -> dict[str, Path]:
    need("tqdm")
    need("matplotlib")
    need("transformers")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    minilm.MODEL.announce()
    subject = load("minilm")
    texts, source = minilm.documents(2 * config.documents, data_folder())
    batches = subject.windows(texts, minilm.LONGEST, 2 * config.documents)
    ours, others = batches[: config.documents], batches[config.documents :]
    plan = calibrate(subject.part, ours, config.budget, seed=config.seed)
    plan = dataclasses.replace(plan, about={**plan.about, "text": source})
    rows = measure(config, subject, plan, others)
    about = f"{subject.title}, {config.documents} texts of {minilm.LONGEST} tokens ({source}); the plan was made on {config.documents} others"
    print(format_rows(rows, about))
    print(f"\n{explain(config)}")
    return write(config, command, about, plan, rows, pictures(subject, plan, others[0], rows, config.budget))


def measure(config: ModelDemoConfig, subject: Subject, plan: Plan, batches: list[Any]) -> list[ModelRow]:
    """Errors first, then the embeddings and times, one method after the other in turns."""
    ways: dict[str, Any] = {EXACT: None, PUBLISHED: Named(PUBLISHED, config.budget), DEFAULT: Named(DEFAULT, config.budget), OURS: plan}
    reports = {name: evaluate(subject.part, way, batches, seed=config.seed) for name, way in ways.items() if way is not None}
    seen: dict[str, tuple[Tensor, float]] = {}
    for _ in range(config.repeats):
        for name, way in ways.items():
            embeddings, seconds = embedded(subject, way, batches)
            seen[name] = embeddings, min(seconds, seen[name][1] if name in seen else seconds)
    truth = seen[EXACT][0]
    rows = []
    for name, (embeddings, seconds) in seen.items():
        cosine, report = (embeddings * truth).sum(-1), reports.get(name)
        spent = (1.0, 0.0, 0.0) if report is None else (report.budget, report.error, report.output_error)
        named = dict(zip(("budget", "error", "output_error"), spent, strict=True))
        rows.append(ModelRow(method=name, **named, cosine=float(cosine.mean()), cosine_least=float(cosine.min()), seconds=seconds, report=report))
    return rows


def embedded(subject: Subject, way: Any, batches: list[Any]) -> tuple[Tensor, float]:
    if way is not None:
        convert(subject.part, way)
    try:
        with torch.no_grad():
            start = time.perf_counter()
            found = torch.cat([embed(subject, batch["input_ids"]) for batch in batches])
            return found, time.perf_counter() - start
    finally:
        if way is not None:
            restore(subject.part)


def pictures(subject: Subject, plan: Plan, batch: Any, rows: list[ModelRow], budget: float) -> list[Picture]:
    """The head that the plan finds easiest, a middle one and the hardest, as matrices."""
    report = next(row.report for row in rows if row.method == OURS)
    assert report is not None
    order = sorted(report.heads, key=lambda head: head.error)
    chosen = [order[0], order[len(order) // 2], order[-1]]
    kept = capture(subject.part, [batch])
    found = []
    for head in chosen:
        seen = kept[head.layer].kept[0]
        recipe = plan.layers[head.layer].heads[head.head].recipe
        exact = weights(seen, head.head, None)
        ways = {PUBLISHED: Named(PUBLISHED, budget), DEFAULT: Named(DEFAULT, budget), OURS: recipe}
        made = {name: weights(seen, head.head, way) for name, way in ways.items()}
        errors = {name: float((w - exact).norm() / exact.norm()) for name, w in made.items()}
        found.append(Picture(title=f"{head.layer}, head {head.head}", weights={EXACT: exact, **made}, errors=errors))
    return found


def weights(seen: Capture, head: int, way: Any) -> Tensor:
    """Attention to the identity is the matrix."""
    q, k = seen.q[:, head : head + 1], seen.k[:, head : head + 1]
    n = k.shape[2]
    method = {"budget": 1.0} if way is None else way.method(n, False)
    columns = torch.eye(n).expand(1, 1, n, n).split(256, -1)
    with torch.no_grad():
        return torch.cat([attention(q, k, part, scale=seen.scale, **method) for part in columns], -1)[0, 0]


def format_rows(rows: list[ModelRow], about: str) -> str:
    lines = []
    for row in rows:
        errors = ("exact", "exact") if row.report is None else (number(row.error), number(row.output_error))
        heads = "all exact" if row.report is None else f"{len(row.report.heads)} heads"
        cells = (heads, f"{row.budget:.3f}", *errors, f"{row.cosine:.4f}", f"{row.cosine_least:.4f}", f"{1e3 * row.seconds:,.0f} ms")
        lines.append((row.method, *cells))
    return block(about, HEADINGS, lines, max(len(row.method) for row in rows))


def explain(config: ModelDemoConfig) -> str:
    return "\n".join(
        (
            "Every attention layer is converted, nothing is retrained. A method may spend "
            f"{config.budget:g} of the entries; budget is what it spends.",
            "Errors are relative Frobenius to softmax attention, mean over heads (predicting zero gives 1). Cosine is between the",
            "embeddings of the exact and of the converted model. Time: all texts, on "
            f"{torch.get_num_threads()} threads, least of {config.repeats} runs taken in turns.",
        )
    )


def write(config: ModelDemoConfig, command: str, about: str, plan: Plan, rows: list[ModelRow], shown: list[Picture]) -> dict[str, Path]:
    from .page import draw, page

    out = Path(config.out)
    paths = {
        "page": out / "index.html",
        "picture": out / "heads.png",
        "errors": out / "errors.png",
        "plan": out / "plan.json",
        "record": out / "model.json",
    }
    draw(rows, shown, paths["picture"], paths["errors"])
    plan.save(paths["plan"])
    record = {
        "type": "scatterbrain-model-demo",
        "version": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "config": dataclasses.asdict(config),
        "versions": machine.versions(("torch", "transformers", "matplotlib")),
        "hardware": machine.hardware(),
        "inputs": about,
        "rows": [row.to_dict() for row in rows],
        "heads": {row.method: [dataclasses.asdict(head) for head in row.report.heads] for row in rows if row.report is not None},
    }
    paths["record"].write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    paths["page"].write_text(
        page(about, format_rows(rows, about), explain(config), plan.summary(), [paths["picture"], paths["errors"]]), encoding="utf-8"
    )
    print()
    for name, path in paths.items():
        print(f"{name:<8} {path}")
    return paths
