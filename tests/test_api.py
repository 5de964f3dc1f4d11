"""What is public, who may import whom, and that configs survive JSON."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import scatterbrain as sb
import torch
from scatterbrain.config import LowRankMap, Support
from scatterbrain.names import NAMES

from cases import MAPS, SUPPORTS, assert_close, normal, qkv

SOURCE = Path(sb.__file__).parent
PARTS = {"LSH", "Clusters", "Columns", "Fixed", "Full", "GlobalTokens", "RandomBlocks", "Routed", "Strided", "TopK", "Window"} | {
    "ClusterMeans",
    "EluPlusOne",
    "Linformer",
    "Nystrom",
    "Performer",
}
OTHERS = {"attention", "explain", "Explanation", "ScatterbrainAttention", "presets", "from_json", "Sampled", "Support", "LowRankMap", "Union"}
MODELS = {"Adaptive", "calibrate", "convert", "evaluate", "replace_sdpa", "restore", "Plan", "Recipe"}
OUTSIDE = ("analysis", "calibration", "integrations", "lab", "report", "cli")


def test_public_names():
    assert set(sb.__all__) == PARTS | OTHERS | MODELS
    assert all(getattr(sb, name) is not None and name in dir(sb) for name in sb.__all__)


def test_what_looks_at_models_is_imported_when_asked_for():
    code = "import sys, scatterbrain; sys.exit(any(m.startswith('scatterbrain.' + p) for m in sys.modules for p in ('calibration', 'integrations')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("first", sorted(MODELS))
def test_any_of_them_may_be_the_first(first):
    """In a fresh process: modules that need each other must not depend on who was imported before."""
    code = f"import scatterbrain as sb; sb.{first}"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_signature_begins_as_sdpa_does():
    ours = list(inspect.signature(sb.attention).parameters.values())
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert [p.name for p in ours[:8]] == names
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[8:])
    doc = torch.nn.functional.scaled_dot_product_attention.__doc__
    assert all(n in doc for n in names)


def imports(path):
    """Modules of scatterbrain that a file imports, as parts below the package."""
    package = path.relative_to(SOURCE).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            names = node.module.split(".") if node.module else []
            for alias in node.names:
                yield (*base, *names, alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "scatterbrain":
            yield (*node.module.split(".")[1:], *(a.name for a in node.names))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "scatterbrain":
                    yield tuple(alias.name.split(".")[1:])


def layer_of(parts):
    head = parts[0] if parts else ""
    return {"__main__": 3, "cli": 3, "cli_analyze": 3, "lab": 2, "analysis": 1, "calibration": 1, "integrations": 1, "report": 1}.get(head, 0)


def test_imports_go_one_way():
    seen = 0
    for path in SOURCE.rglob("*.py"):
        mine = layer_of(path.relative_to(SOURCE).with_suffix("").parts)
        for target in imports(path):
            assert layer_of(target) <= mine, f"{path.name} imports {'.'.join(target)}"
            seen += 1
    assert seen > 50


def test_supports_and_maps_do_not_know_the_implementations():
    for folder in ("supports", "features"):
        for path in (SOURCE / folder).glob("*.py"):
            assert not [t for t in imports(path) if t[:1] == ("impl",)], path.name


def outside_imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


def test_core_needs_torch_only():
    for path in SOURCE.rglob("*.py"):
        if layer_of(path.relative_to(SOURCE).with_suffix("").parts) == 0:
            assert set(outside_imports(path)) <= {"torch", "scatterbrain", *sys.stdlib_module_names}, path.name


@pytest.mark.parametrize("config", [*SUPPORTS.values(), *MAPS.values()], ids=repr)
def test_json_round_trip(config):
    text = config.to_json()
    assert json.loads(text)["version"] == 1
    assert sb.from_json(text) == config


def test_every_public_part_is_in_the_name_table_and_in_the_contract():
    parts = {n for n in sb.__all__ if inspect.isclass(getattr(sb, n)) and issubclass(getattr(sb, n), (Support, LowRankMap))} - {
        "Support",
        "LowRankMap",
    }
    assert set(NAMES) == parts
    tested = {type(c).__name__ for c in (*SUPPORTS.values(), *MAPS.values())}
    assert tested == parts


def test_configs_are_frozen():
    with pytest.raises(AttributeError):
        sb.Window(3).size = 4
    assert sb.Window(3) == sb.Window(3) and hash(sb.Performer(4)) == hash(sb.Performer(4))


PRESETS = list(sb.presets.__all__)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs_near_its_entries(preset):
    make = getattr(sb.presets, preset)
    takes = inspect.signature(make).parameters
    n, entries = 256, 64
    method = make(**({"entries": entries} if "entries" in takes else {}), **({"length": n} if "length" in takes and preset != "linformer" else {}))
    q, k, v = qkv(n, n, d=16, batch=1, dtype=torch.float32)
    out = sb.attention(q, k, v, **method)
    assert_close(out, sb.attention(q, k, v, impl="reference", **method), torch.float32, 10, 100.0 if preset == "nystromformer" else 1.0)
    if "entries" in takes:
        told = sb.explain(q, k, v, **method)
        assert 0.5 * entries <= told.entries_sparse + told.entries_low_rank <= 1.15 * entries


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [3, 17, 100, 700])
@pytest.mark.parametrize("budget", [1 / 32, 1 / 8, 1 / 2, 1.0])
def test_the_default_keeps_to_its_budget(length, budget, causal):
    q = normal(1, 2, length, 16, dtype=torch.float32)
    told = sb.explain(q, normal(1, 2, length, 16, seed=1, dtype=torch.float32), q, budget=budget, is_causal=causal)
    assert told.budget <= 1.1 * budget + 12 / max(1, told.entries_full)
    if budget == 1.0:
        assert told.budget == pytest.approx(1.0)


def test_explain_reads_well_and_counts():
    q, k, v = qkv(40, 40, dtype=torch.float32)
    told = sb.explain(q, k, v, support=sb.Window(8), low_rank=sb.Performer(4), impl="torch")
    assert told.entries_low_rank == 8 and 8 < told.entries_sparse <= 9 and told.entries_full == 40
    text = str(told)
    assert all(word in text for word in ("Window(size=8", "Performer(features=4", "torch", "FLOPs", "budget", "MiB"))
    assert json.dumps(told.to_dict())
