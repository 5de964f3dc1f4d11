"""`scatterbrain calibrate` and `scatterbrain evaluate`: a model and a text in, a plan or a report out."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..calibration.calibrate import calibrate
from ..calibration.evaluate import evaluate
from ..calibration.plan import Plan, aligned
from ..errors import require
from ..integrations.convert import calls, convert, restore
from . import peak
from .extras import need
from .subjects import LONGEST, Subject, calibration_inputs, held_out_inputs, load
from .tasks import compare_transcripts, transcript

CHARACTERS = 12  # a token of English is shorter


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """`text` None takes WikiText-2 from the data folder (and for Whisper its speech)."""

    model: str
    text: str | None = None
    length: int | None = None
    inputs: int = 4
    budget: float | None = None
    error: float | None = None
    policy: str = "measured"
    objective: str | None = None
    plan: str | None = None
    fallback: str = "raise"
    seed: int = 0
    threads: int | None = None
    out: str | None = None


def run_calibrate(config: FitConfig) -> Path:
    _threads(config)
    out = Path(config.out or "plan.json")
    require(out.parent.is_dir(), "out", "lie in a folder that exists", out.parent, "make it first")
    subject = load(config.model)
    batches, about = inputs_of(config, subject, calibration_inputs, "first")
    print(f"{subject.title}: calibrating on {about}", flush=True)
    aim: dict[str, Any] = {"error": config.error, "policy": config.policy, "objective": config.objective}
    plan = calibrate(subject.part, batches, config.budget, seed=config.seed, **aim)
    print(plan.summary())
    print(f"\nplan  {plan.save(out)}")
    return out


def run_evaluate(config: FitConfig) -> Path | None:
    """Errors a layer and head, then the task before and after: what it says, time, and memory."""
    _threads(config)
    plan = Plan.load(config.plan or "plan.json")
    subject = load(config.model)
    batches, about = inputs_of(config, subject, held_out_inputs, "last")
    print(f"{subject.title}: measuring on {about}", flush=True)
    report = evaluate(subject.part, plan, batches, seed=config.seed)
    print(report.table())
    before, after = before_and_after(subject, plan, batches, config.fallback)
    lines = [("", *before), *((name, *map(str, values.values())) for name, values in (("exact", before), ("converted", after)))]
    print("\n" + "\n".join(aligned(lines, right=tuple(range(1, len(before) + 1)))))
    if config.out is None:
        return None
    path = Path(config.out)
    body = {"model": config.model, "inputs": about, "exact": before, "converted": after, "report": report.to_dict()}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(f"\nreport  {path}")
    return path


def inputs_of(config: FitConfig, subject: Subject, usual: Callable[[Subject, int], tuple[list[Any], str]], which: str) -> tuple[list[Any], str]:
    """Windows of the text: calibration takes its first, evaluation its last, so that one long text can serve both."""
    if config.text is None:
        return usual(subject, config.inputs)
    require(subject.tokenizer is not None, "text", "be left out for a model of speech", config.text, "leave it out")
    text = Path(config.text).read_text(encoding="utf-8")
    length = min(config.length or LONGEST, subject.longest)
    reach = CHARACTERS * length * config.inputs
    ids = subject.ids(text[:reach] if which == "first" else text[-reach:])
    parts = [part for part in ids.split(length, 1) if part.shape[1] == length]
    enough = "a longer text, a shorter --length or fewer --inputs"
    require(len(parts) >= config.inputs, "text", f"hold {config.inputs} windows of {length} tokens", len(parts), f"pass {enough}")
    parts = parts[: config.inputs] if which == "first" else parts[-config.inputs :]
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} | ({"use_cache": False} if subject.causal else {}) for part in parts]
    return batches, f"the {which} {config.inputs} windows of {length} tokens of {config.text}"


def before_and_after(subject: Subject, plan: Plan, batches: list[Any], fallback: str) -> tuple[dict[str, str], dict[str, str]]:
    """The same work by the exact and by the converted model, each after a call to warm up."""
    exact, before = worked(subject, batches)
    convert(subject.part, plan, fallback=fallback)
    try:
        got, after = worked(subject, batches)
        calls(subject.part)
    finally:
        restore(subject.part)
    name, values = compared(subject, exact, got)
    return {name: values[0], **before}, {name: values[1], **after}


def worked(subject: Subject, batches: list[Any]) -> tuple[Any, dict[str, str]]:
    with torch.no_grad():
        answer(subject, batches[:1])
        taken = Peak()
        start = time.perf_counter()
        said = answer(subject, batches)
        seconds = time.perf_counter() - start
    return said, {"seconds": f"{seconds:.2f}", "extra memory": taken.said()}


class Peak:
    """Memory beyond what is held now, where the system tells."""

    def __init__(self) -> None:
        self.before: int | None = None
        with contextlib.suppress(OSError):
            peak.give_back()
            peak.CLEAR.write_text("5")
            self.before = peak.resident("VmRSS")

    def said(self) -> str:
        return "not known" if self.before is None else f"{(peak.resident('VmHWM') - self.before) / 2**20:,.0f} MiB"


def answer(subject: Subject, batches: list[Any]) -> Any:
    """What the task is about: losses of a language model, a transcript, else mean embeddings."""
    if subject.name == "whisper":
        return transcript(subject).run() if len(batches) > 1 else subject.part(batches[0])
    if subject.causal:
        return torch.cat([losses(subject, batch) for batch in batches])
    return torch.cat([F.normalize(subject.part(**batch)[0].mean(1), dim=-1) for batch in batches])


def losses(subject: Subject, batch: dict[str, Any]) -> Tensor:
    logits = subject.part(**batch).logits[0, :-1]
    return F.cross_entropy(logits.float(), batch["input_ids"][0, 1:], reduction="none")


def compared(subject: Subject, exact: Any, got: Any) -> tuple[str, tuple[str, str]]:
    if isinstance(exact, str):
        found = compare_transcripts(exact, got)
        return "words that differ", ("0", f"{found['wrong_words']} of {found['words']}")
    if subject.causal:
        return "perplexity", (f"{float(exact.mean().exp()):.2f}", f"{float(got.mean().exp()):.2f}")
    if exact.dim() == 2:
        return "cosine to exact", ("1.0000", f"{float((exact * got).sum(-1).mean()):.4f}")
    return "relative error", ("0", f"{float((exact - got).norm() / exact.norm()):.4f}")


def _threads(config: FitConfig) -> None:
    need("tqdm")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
