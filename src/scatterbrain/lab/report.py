"""One page of all saved records: interactive, self-contained, opened from disk. Measures nothing."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from .analyze import studies
from .extras import LabError, need
from .plate_page import figure
from .study import Study, load

HEIGHT = 360


def write(records: Path, out: Path) -> Path:
    """The page of every record of a study in `records`, in the studies' order."""
    found = [(study, load(records / f"{name}.json")) for name, study in studies().items() if (records / f"{name}.json").is_file()]
    for name in [study.name for study, record in found if not record["complete"]]:
        print(f"left out: {records / name}.json is unfinished; run `scatterbrain analyze {name}` again to go on with it")
    found = [(study, record) for study, record in found if record["complete"]]
    if not found:
        raise LabError(f"{records} holds no record; run `scatterbrain analyze all --out {records}` first")
    script = need("plotly.offline", "analysis").get_plotlyjs()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(found, script), encoding="utf-8")
    print(f"page    {out} ({out.stat().st_size / 2**20:.1f} MiB, {len(found)} studies)")
    return out


def page(found: list[tuple[Study, dict[str, Any]]], script: str) -> str:
    links = "".join(f'<a href="#{study.name}">{html.escape(study.title)}</a>' for study, _ in found)
    plots: list[dict[str, Any]] = []
    sections = "".join(_checked(study, record, plots) for study, record in found)
    # "</" inside a script element would end it.
    data = json.dumps(plots, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>Scatterbrain: analysis</title><link rel='icon' href='data:,'><style>{STYLE}</style><script>{script}</script></head><body>"
        f"<header><h1>Why sparse, low-rank or both</h1><p>{INTRO}</p><nav>{links}</nav></header>{sections}"
        f"<script>const plots={data};{DRAW}</script></body></html>"
    )


def _checked(study: Study, record: dict[str, Any], plots: list[dict[str, Any]]) -> str:
    try:
        return section(study, record, plots)
    except (KeyError, IndexError, TypeError) as missing:
        raise LabError(f"{study.name}.json lacks {missing}, which this version's page needs; run `scatterbrain analyze {study.name}` again") from None


def section(study: Study, record: dict[str, Any], plots: list[dict[str, Any]]) -> str:
    plate = study.plate(record)
    boxes = []
    for panel in plate.panels:
        boxes.append(f"<div class='plot' id='p{len(plots)}'></div>")
        plots.append(figure(panel))
    narrow = " narrow" if plate.columns > 3 else ""
    count = min(plate.columns, len(plate.panels))
    where = record["hardware"]
    told = (
        f"{record['date']} · {record['command'] or 'from Python'} · {record['seconds']:,.0f} s on {where['processor']}, {where['threads']} threads · "
        f"torch {record['versions']['torch']}"
    )
    numbers = html.escape("\n".join(study.text(record)))
    return (
        f"<section id='{study.name}'><h2>{html.escape(plate.title)}</h2><p>{html.escape(plate.caption)}</p>"
        f"<div class='grid{narrow}' style='--columns:{count}'>{''.join(boxes)}</div>"
        f"<details open><summary>Numbers</summary><pre>{numbers}</pre></details><p class='told'>{html.escape(told)}</p></section>"
    )


INTRO = (
    "The observations, theorems and figures of &ldquo;Scatterbrain: Unifying Sparse and Low-rank Attention&rdquo; (Chen et al. 2021), measured. "
    "Every number here comes from a saved record; hover, zoom and click legends to explore."
)

STYLE = f"""
:root {{ color: #22282e; font: 15px/1.5 system-ui, sans-serif; }}
body {{ margin: 0 auto; max-width: 1500px; padding: 0 20px 60px; }}
h1 {{ margin: 24px 0 4px; }} h2 {{ margin: 44px 0 4px; border-top: 1px solid #e3e6e9; padding-top: 20px; }}
p {{ max-width: 90ch; margin: 4px 0 10px; }}
nav {{ display: flex; flex-wrap: wrap; gap: 6px 16px; }} a {{ color: #2b6ca3; }}
.grid {{ display: grid; gap: 8px; grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); }}
.plot {{ height: {HEIGHT}px; min-width: 0; }} .narrow .plot {{ height: 250px; }}
@media (max-width: 900px) {{ .grid {{ grid-template-columns: minmax(0, 1fr); }} }}
pre {{ overflow-x: auto; background: #f6f7f8; padding: 10px; font-size: 12px; line-height: 1.4; }}
.told {{ color: #5f6b76; font-size: 12px; }}
"""

# Plots are drawn when they come near the screen: browsers hold only a few WebGL scenes, and the page opens at once.
DRAW = """
const options = {responsive: true, displaylogo: false, displayModeBar: 'hover'};
const draw = el => { const f = plots[+el.id.slice(1)]; Plotly.newPlot(el, f.data, f.layout, options); };
const near = new IntersectionObserver(all => all.forEach(e => {
  if (e.isIntersecting) { near.unobserve(e.target); draw(e.target); }
}), {rootMargin: '600px'});
document.querySelectorAll('.plot').forEach(el => near.observe(el));
"""
