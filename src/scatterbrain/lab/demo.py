"""`scatterbrain demo`: a pretrained model converted; or error and time of the known methods and the default, at one budget, on made
and on real attention."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import require, require_int
from . import machine, minilm
from .extras import need
from .figure import GridPanel, draw
from .grid import BETA_FACTORS, CLUSTER_SIZES, Cell, Grid, ranked, spreads
from .measure import CHECKED, OURS, Inputs, Measurement, Row
from .models import data_folder
from .process1 import Process1
from .table import format_grid, format_table

DATA = ("model", "process1", "minilm")
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What to measure: a converted model (lab/demo_model.py), or attention alone. `threads` None leaves torch's own number.

    Process 1 is compared over a grid of cells (lab/grid.py) and timed at one of them, longer. cluster_size and
    beta_factor name that one: the cell of the grid where the default's error is the median, at the timed length.
    (At 1,024 tokens the median is clusters of 64 at factor 1, but at 4,096 that is the default's easiest cell.)
    """

    budget: float = 1 / 8
    data: tuple[str, ...] = ("model",)
    length: int = 4096
    heads: int = 8
    width: int = 64
    cluster_size: int = 16
    beta_factor: float = 0.5
    delta: float = 0.1
    matrix_heads: int = 4
    grid_length: int = 1024
    grid_draws: int = 5
    documents: int = 4
    repeats: int = 5
    threads: int | None = None
    seed: int = 0
    out: str = "demo"

    def __post_init__(self) -> None:
        require(0 < self.budget <= 1, "budget", "lie in (0, 1]", self.budget, "pass the share of entries to spend, such as 0.125")
        known = bool(self.data) and set(self.data) <= set(DATA)
        require(known, "data", f"name some of {', '.join(DATA)}", self.data, "pass some of them")
        for name in ("length", "heads", "width", "matrix_heads", "grid_draws", "documents", "repeats"):
            require_int(getattr(self, name), name)
        require_int(self.grid_length, "grid_length", least=max(CLUSTER_SIZES))
        if self.threads is not None:
            require_int(self.threads, "threads")
        require_int(self.seed, "seed", least=0)


def run(config: DemoConfig, command: str = "") -> dict[str, Path]:
    """Measure, print tables, and write pictures, a page and records; returns where they are."""
    paths = convert_a_model(config, command) if "model" in config.data else {}
    if set(config.data) - {"model"}:
        print("\n" if paths else "", end="")
        paths |= compare_attention(config, command)
    return paths


def convert_a_model(config: DemoConfig, command: str) -> dict[str, Path]:
    from . import demo_model

    given = {name: getattr(config, name) for name in ("budget", "documents", "repeats", "threads", "seed", "out")}
    return demo_model.run(demo_model.ModelDemoConfig(**given), command)


def compare_attention(config: DemoConfig, command: str) -> dict[str, Path]:
    """Measure, print the table, and write a figure and a record; returns where they are."""
    # Missing packages are said before the work, not after it.
    tqdm = need("tqdm").tqdm
    need("matplotlib")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    inputs = gather(config)
    grid = process1_grid(config) if "process1" in config.data else None
    measurements = [Measurement(one, config.budget, config.repeats) for one in inputs]
    # A folder that cannot be made is said before the work, too.
    Path(config.out).mkdir(parents=True, exist_ok=True)
    steps = sum(m.steps for m in measurements) + (grid.steps if grid else 0)
    with tqdm(total=steps, unit="step", leave=False, dynamic_ncols=True) as bar:

        def tick(data: str, step: str) -> None:
            bar.set_description_str(f"{data}: {step}", refresh=False)
            bar.update()

        cells = grid.run(partial(tick, "Process 1, grid")) if grid else []
        rows = [row for m in measurements for row in m.run(partial(tick, m.inputs.name))]
    about = {one.name: one.about for one in inputs}
    print(format_table(rows, about))
    if cells:
        print(f"\n{format_grid(spreads(cells), about_grid(config))}")
    print(f"\n{explain_columns(config)}")
    if cells:
        print(explain_grid(config, cells))
    return write(describe(config, command, about, rows, cells), rows, cells, config)


def gather(config: DemoConfig) -> list[Inputs]:
    made = {"process1": process1_inputs, "minilm": minilm_inputs}
    return [make(config) for name, make in made.items() if name in config.data]


def process1_grid(config: DemoConfig) -> Grid:
    process = Process1(n=config.grid_length, d=config.width, delta=config.delta)
    return Grid(process, config.budget, config.grid_draws, config.seed)


def process1_inputs(config: DemoConfig) -> Inputs:
    size, factor = config.cluster_size, config.beta_factor
    process = Process1(n=config.length, d=config.width, cluster_size=size, delta=config.delta, beta_factor=factor)
    generator = torch.Generator().manual_seed(config.seed)
    z, _ = process.sample(generator, config.heads)
    about = (
        f"{config.length:,} tokens in clusters of {size}, {config.heads} heads of width {config.width}, "
        f"beta {process.scale:.3g} ({factor:g} x middle), delta {config.delta:g}; queries = keys"
    )
    values = torch.randn(z.shape, generator=generator)
    return Inputs(name="Process 1", about=about, q=z, k=z, v=values, scale=process.scale, matrix_heads=min(config.matrix_heads, config.heads))


def minilm_inputs(config: DemoConfig) -> Inputs:
    minilm.MODEL.announce()
    texts, source = minilm.documents(config.documents, data_folder())
    q, k, v = minilm.qkv(minilm.fetch(), texts)
    layers = q.shape[0] // config.documents
    about = f"{config.documents} texts of {q.shape[2]} tokens ({source}), {layers} layers x {q.shape[1]} heads of width {q.shape[3]}"
    return Inputs(name="MiniLM", about=about, q=q, k=k, v=v, scale=q.shape[3] ** -0.5, matrix_heads=q.shape[1])


def explain_columns(config: DemoConfig) -> str:
    heads = min(config.matrix_heads, config.heads)
    return "\n".join(
        (
            f"Every method may spend {config.budget:g} of the entries; entries and budget are those spent, as scatterbrain.explain counts them.",
            "Errors are relative Frobenius to softmax attention, mean over heads; predicting zero gives 1.",
            f"The output error takes all heads; the matrix error, on Process 1, the first {heads} of {config.heads}. Each method agreed with",
            f"the dense reference, on the first {CHECKED} tokens of two heads, before it was timed.",
            f"Time: forward on {torch.get_num_threads()} threads, selection and sampling included, least of {config.repeats} runs taken in turns.",
        )
    )


def about_grid(config: DemoConfig) -> str:
    cells = len(CLUSTER_SIZES) * len(BETA_FACTORS)
    return f"Process 1, over the grid: matrix error in {cells} cells, {config.grid_length:,} tokens, one head of width {config.width}"


def explain_grid(config: DemoConfig, cells: list[Cell]) -> str:
    sizes, factors = (f"{', '.join(f'{x:g}' for x in some[:-1])} and {some[-1]:g}" for some in (CLUSTER_SIZES, BETA_FACTORS))
    return "\n".join(
        (
            f"The grid: clusters of {sizes} tokens x beta of {factors} times the middle temperature, log(tokens) / sqrt(width).",
            f"A cell's error is the median of {config.grid_draws} draws, of data and method alike; the worst draw is the largest error of all.",
            place_in_grid(config, cells),
            *why_timed(config),
        )
    )


def why_timed(config: DemoConfig) -> list[str]:
    """The choice holds for the settings it was made with; a test measures it again."""
    names = ("length", "width", "delta", "budget", "cluster_size", "beta_factor")
    usual = all(getattr(config, name) == getattr(DemoConfig, name) for name in names)
    return [f"It was fixed because, of these cells measured at {config.length:,} tokens, it has the default's median error."] if usual else []


def place_in_grid(config: DemoConfig, cells: list[Cell]) -> str:
    """Whether the timed cell is an easy one, from what was measured."""
    order = ranked(cells, OURS)
    timed = f"The timed Process 1 (clusters of {config.cluster_size}, {config.beta_factor:g} x the middle beta)"
    place = (config.cluster_size, config.beta_factor)
    if place not in order:
        return f"{timed} is not a cell of the grid."
    rank, middle = order.index(place) + 1, (len(order) + 1) // 2
    said = f"{timed} is number {rank} of {len(order)} cells by the default's error there, least first"
    return f"{said}: the median." if rank == middle else f"{said}; number {middle} is the median."


def describe(config: DemoConfig, command: str, about: dict[str, str], rows: list[Row], cells: list[Cell]) -> dict[str, Any]:
    return {
        "type": "scatterbrain-demo",
        "version": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "config": dataclasses.asdict(config),
        "versions": machine.versions(("torch", "transformers", "matplotlib")),
        "hardware": machine.hardware(),
        "seed": config.seed,
        "inputs": about,
        "rows": [row.to_dict() for row in rows],
        "grid": [cell.to_dict() for cell in cells],
    }


def write(record: dict[str, Any], rows: list[Row], cells: list[Cell], config: DemoConfig) -> dict[str, Path]:
    out = Path(config.out)
    paths = {"figure": out / "demo.png", "record": out / "demo.json"}
    panel = GridPanel(about=about_grid(config), cells=cells, timed=(config.cluster_size, config.beta_factor)) if cells else None
    draw(rows, record["inputs"], panel, config.budget, paths["figure"])
    paths["record"].write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print()
    for name, path in paths.items():
        print(f"{name:<7} {path}")
    sys.stdout.flush()
    return paths
