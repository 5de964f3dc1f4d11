"""The demo's page and pictures: some heads as matrices, every head's error, the table and the plan."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .extras import need
from .table import number

if TYPE_CHECKING:
    from .demo_model import ModelRow, Picture

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#22282e;background:#fff}
pre{overflow-x:auto;background:#f4f5f7;padding:1rem;font-size:13px;line-height:1.35}img{width:100%;height:auto}h1{font-size:1.5rem}h2{font-size:1.15rem}"""


def draw(rows: list[ModelRow], shown: list[Picture], matrices: Path, errors: Path) -> None:
    need("matplotlib").use("agg")
    plt = need("matplotlib.pyplot")
    _matrices(plt, shown, matrices)
    _errors(plt, [row for row in rows if row.report is not None], errors)


def _matrices(plt: Any, shown: list[Picture], path: Path) -> None:
    """Colour is the weight's logarithm, the same in a row; entries below a millionth of a row look alike."""
    names = list(shown[0].weights)
    figure, axes = plt.subplots(len(shown), len(names), figsize=(2.9 * len(names), 3.1 * len(shown)), squeeze=False, layout="constrained")
    for line, picture in zip(axes, shown, strict=True):
        top = float(picture.weights[names[0]].max())
        for ax, name in zip(line, names, strict=True):
            shade = torch.log10(picture.weights[name].clamp(min=1e-6))
            ax.imshow(shade, cmap="magma", vmin=-6, vmax=max(-5.0, torch.log10(torch.tensor(top)).item()), interpolation="antialiased")
            error = picture.errors.get(name)
            ax.set_title(name if error is None else f"{name}: error {number(error)}", fontsize=9.5)
            ax.set_xticks([])
            ax.set_yticks([])
        line[0].set_ylabel(picture.title, fontsize=9)
    figure.suptitle("Three heads: the easiest, a middle one and the hardest for the plan (rows are queries, log scale)", fontsize=11)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _errors(plt: Any, rows: list[ModelRow], path: Path) -> None:
    figure, axes = plt.subplots(1, len(rows), figsize=(3.9 * len(rows), 3.4), squeeze=False, layout="constrained")
    for ax, row in zip(axes[0], rows, strict=True):
        assert row.report is not None
        layers = list(dict.fromkeys(head.layer for head in row.report.heads))
        grid = [[head.error for head in row.report.heads if head.layer == layer] for layer in layers]
        image = ax.imshow(grid, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        ax.set_title(f"{row.method}: mean {number(row.error)}", fontsize=10)
        ax.set_xlabel("head")
        ax.set_yticks(range(len(layers)), [str(n) for n in range(len(layers))])
    axes[0][0].set_ylabel("layer")
    figure.colorbar(image, ax=axes[0], label="matrix error (1: predicting zero)")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def page(about: str, table: str, notes: str, plan: str, pictures: list[Path]) -> str:
    """One file: the pictures are inside it."""
    images = [f'<img alt="{path.stem}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">' for path in pictures]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Scatterbrain: a converted model</title><style>{STYLE}</style>",
        f"<h1>A pretrained model, its attention replaced</h1><p>{html.escape(about)}</p>",
        f"<pre>{html.escape(table)}</pre><p>{html.escape(notes)}</p>",
        *images,
        f"<h2>The plan</h2><pre>{html.escape(plan)}</pre></html>",
    ]
    return "\n".join(parts) + "\n"
