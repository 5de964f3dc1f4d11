"""Attention to analyse: what layers of pretrained models receive, what Process 1 makes, or what a file holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..analysis import check_attention, check_matrix, exact
from ..errors import require
from . import minilm, smollm, whisper
from .extras import LabError
from .models import data_folder
from .process1 import Process1

MODELS = ("minilm", "whisper", "smollm2")
NAMES = (*MODELS, "process1")
SMOLLM_LAYERS = tuple(range(0, 30, 3))


@dataclass(frozen=True, kw_only=True)
class Heads:
    """q, k (L, H, N, D) of one source, or, where only that is known, its attention (L, H, N, M)."""

    name: str
    about: str
    q: Tensor | None
    k: Tensor | None
    scale: float = 1.0
    causal: bool = False
    given: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, heads, queries, keys."""
        if self.given is not None:
            layers, heads, n, m = self.given.shape
            return layers, heads, n, m
        assert self.q is not None and self.k is not None
        return (*self.q.shape[:3], self.k.shape[2])

    def attention(self, layer: int, head: int | slice = slice(None)) -> Tensor:
        """(H, N, M), or (N, M) of one head."""
        if self.given is not None:
            return self.given[layer, head].float()
        q, k = self.pair(layer, head)
        found = exact(q, k, self.scale, self.causal)[0]
        return found[0] if isinstance(head, int) else found

    def pair(self, layer: int, head: int | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """q and k (1, H, N, D) of a layer."""
        if self.q is None or self.k is None:
            raise LabError(f"{self.name} holds attention matrices alone; this study needs q and k: save both in the file")
        some = slice(head, head + 1) if isinstance(head, int) else head
        return self.q[layer : layer + 1, some], self.k[layer : layer + 1, some]

    @property
    def visible(self) -> float:
        """Keys that a row sees, mean over rows."""
        _, _, n, m = self.shape
        return (n + 1) / 2 if self.causal else float(m)


def load(name: str, *, length: int | None = None, documents: int = 1, seed: int = 0) -> Heads:
    """One of NAMES, or the path of a file that `torch.save` wrote."""
    if name == "minilm":
        return _minilm(length or minilm.LONGEST, documents)
    if name == "whisper":
        return _whisper(length)
    if name == "smollm2":
        return _smollm(length or 512)
    if name == "process1":
        return _process1(length or 512, seed)
    return from_file(Path(name))


def _minilm(length: int, documents: int) -> Heads:
    minilm.MODEL.announce()
    texts, source = minilm.documents(documents, data_folder())
    q, k, _ = minilm.qkv(minilm.fetch(), texts, length)
    about = f"MiniLM on {documents} text(s) of {length} tokens ({source}), 6 layers x 12 heads of width 32"
    return Heads(name="MiniLM", about=about, q=q, k=k, scale=q.shape[3] ** -0.5)


def _whisper(length: int | None) -> Heads:
    whisper.MODEL.announce()
    q, k, _ = whisper.qkv(whisper.MODEL.fetch(), whisper.speech(data_folder()))
    if length:
        require(2 <= length <= q.shape[2], "length", f"lie in [2, {q.shape[2]}]", length, "the encoder has no more frames")
        q, k = q[:, :, :length], k[:, :, :length]
    about = f"Whisper tiny.en's encoder on 30 s of speech, {q.shape[2]:,} frames, 4 layers x 6 heads of width 64"
    return Heads(name="Whisper encoder", about=about, q=q, k=k, scale=q.shape[3] ** -0.5)


def _smollm(length: int) -> Heads:
    smollm.MODEL.announce()
    words, source = smollm.text(data_folder())
    q, k, _ = smollm.qkv(smollm.MODEL.fetch(), words, length, SMOLLM_LAYERS)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    about = f"SmolLM2-135M on {length:,} tokens ({source}), causal, layers {', '.join(map(str, SMOLLM_LAYERS))} of 30, 9 heads of width 64"
    return Heads(name="SmolLM2", about=about, q=q, k=k, scale=q.shape[3] ** -0.5, causal=True)


def _process1(length: int, seed: int) -> Heads:
    """Three temperatures as layers."""
    layers = []
    for layer, factor in enumerate((0.25, 0.5, 1.0)):
        z, _ = Process1(n=length, cluster_size=8).sample(torch.Generator().manual_seed(seed + layer), 4)
        layers.append(z * factor**0.5)
    q = torch.cat(layers)
    about = f"Process 1: {length} tokens in clusters of 8, width 64, delta 0.1, beta 0.25, 0.5 and 1 x middle, 4 draws each"
    return Heads(name="Process 1", about=about, q=q, k=q, scale=Process1(n=length).scale)


def from_file(path: Path) -> Heads:
    """A dict with q and k (L, H, N, D), and scale and causal if they are not 1 / sqrt(D) and False; or with attention (L, H, N, M)."""
    if not path.is_file():
        raise LabError(f"{path} is no file and none of {', '.join(NAMES)}; name one of these")
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise LabError(f"{path} is not a file of tensors that torch.save wrote ({type(error).__name__})") from None
    ok = isinstance(found, dict) and ("attention" in found or {"q", "k"} <= set(found))
    require(ok, str(path), "hold a dict with 'attention', or with 'q' and 'k'", type(found).__name__, "torch.save({'q': q, 'k': k}, path)")
    for name in ("attention", "q", "k"):
        if name in found:
            check_matrix(found[name], name)
            require(found[name].dim() == 4, name, "have shape (layers, heads, length, ...)", tuple(found[name].shape), "add the missing axes")
    given = check_attention(found["attention"]) if "attention" in found else None
    q, k = found.get("q"), found.get("k")
    if q is not None and k is not None:
        require(q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3], "k", f"match q {tuple(q.shape)}", tuple(k.shape), "repeat shared heads")
        q, k = q.float(), k.float()
    width = 1 if q is None else q.shape[3]
    scale, causal = float(found.get("scale", width**-0.5)), bool(found.get("causal", False))
    shape = tuple((q if q is not None else found["attention"]).shape)
    return Heads(name=path.stem, about=f"{path.name}, {shape}", q=q, k=k, scale=scale, causal=causal, given=given)
