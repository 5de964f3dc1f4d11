"""The inputs of the benchmark: made ones at every length, and what layers of pretrained models receive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import minilm, smollm, whisper
from .contenders import Shape
from .models import data_folder
from .process1 import Process1

MADE = ("normal", "process1")
REAL = ("minilm", "whisper", "smollm2")
DATA = (*MADE, *REAL)
SMOLLM_LENGTHS = (2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class Case:
    """q (B, H, N, D), k and v (B, kv heads, N, D) of one kind and length."""

    data: str
    about: str
    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor

    def head(self, b: int, h: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        kv = h * self.shape.kv_heads // self.shape.heads
        return self.q[b, h].to(dtype), self.k[b, kv].to(dtype), self.v[b, kv].to(dtype)

    def cut(self, length: int, batch: int | None = None) -> Case:
        """The first tokens: a shorter case of the same kind."""
        q, k, v = (t[:batch, :, :length] for t in (self.q, self.k, self.v))
        shape = self.shape.at(length)
        return make(self.data, self.about, q, k, v, shape)


def make(data: str, about: str, q: Tensor, k: Tensor, v: Tensor, like: Shape) -> Case:
    """Casts to the dtype of `like` and takes sizes from the tensors."""
    q, k, v = (t.to(getattr(torch, like.dtype)).contiguous() for t in (q, k, v))
    (batch, heads, length, width), kv_heads = q.shape, k.shape[1]
    fields = {**vars(like), "batch": batch, "heads": heads, "kv_heads": kv_heads, "length": length, "width": width}
    return Case(data=data, about=about, shape=Shape(**fields), q=q, k=k, v=v)


def lengths(data: str, asked: tuple[int, ...]) -> tuple[int, ...]:
    """Made data has every length; the models have their own, of which SmolLM2's follow the longest asked for."""
    own = {"minilm": (minilm.LONGEST,), "whisper": (1500,), "smollm2": tuple(n for n in SMOLLM_LENGTHS if n <= max(asked)) or SMOLLM_LENGTHS[:1]}
    return own.get(data, asked)


def not_causal(data: str, causal: bool) -> str:
    return "its attention is not causal" if causal and data in ("minilm", "whisper") else ""


def cases(data: str, asked: tuple[int, ...], like: Shape) -> Iterator[tuple[int, Callable[[], Case]]]:
    """Each length with what makes its case, shortest first, so that what takes too long is seen coming."""
    makers = {"normal": normal, "process1": process1, "minilm": minilm_case, "whisper": whisper_case, "smollm2": smollm_case}
    longest = max(lengths(data, asked))
    for length in lengths(data, asked):
        yield length, functools.partial(makers[data], length, longest, like)


def normal(length: int, longest: int, like: Shape) -> Case:
    generator = torch.Generator().manual_seed(like.seed)
    q, k, v = torch.randn(3, like.batch, like.heads, length, like.width, generator=generator)
    return make("normal", "independent standard normal numbers", q, k, v, like)


def process1(length: int, longest: int, like: Shape) -> Case:
    generator = torch.Generator().manual_seed(like.seed)
    process = Process1(n=length, d=like.width, cluster_size=min(length, 16), beta_factor=0.5)
    z, _ = process.sample(generator, like.heads)
    about = "Process 1 of the paper: clusters of 16 tokens, beta 0.5 x middle, delta 0.1; queries = keys"
    return make("process1", about, z, z, torch.randn(z.shape, generator=generator), scaled(like, process.scale, like.causal))


def minilm_case(length: int, longest: int, like: Shape) -> Case:
    (q, k, v), source = encoder_layers()
    about = f"MiniLM on a text ({source}), all 6 layers as a batch, 12 heads of width 32"
    return make("minilm", about, q, k, v, scaled(like, q.shape[3] ** -0.5, False))


def whisper_case(length: int, longest: int, like: Shape) -> Case:
    q, k, v = frames()
    about = "Whisper tiny.en's encoder on 30 s of speech, all 4 layers as a batch, 6 heads of width 64"
    return make("whisper", about, q, k, v, scaled(like, q.shape[3] ** -0.5, False))


def smollm_case(length: int, longest: int, like: Shape) -> Case:
    """A causal model gives a prefix what it gives the whole: one pass serves all lengths."""
    (q, k, v), source = decoder_layers(longest)
    q, k, v = (t[:, :, :length] for t in (q, k, v))
    named = ", ".join(map(str, smollm.LAYERS))
    about = f"SmolLM2-135M on {source}, causal, layers {named} of 30 as a batch, 9 heads over 3, width 64, after RoPE"
    return make("smollm2", about, q, k, v, scaled(like, q.shape[3] ** -0.5, True))


def scaled(like: Shape, scale: float, causal: bool) -> Shape:
    return Shape(**{**vars(like), "scale": scale, "causal": causal})


@functools.cache
def encoder_layers() -> tuple[tuple[Tensor, Tensor, Tensor], str]:
    texts, source = minilm.documents(1, data_folder())
    return minilm.qkv(_fetch(minilm.MODEL), texts), source


@functools.cache
def frames() -> tuple[Tensor, Tensor, Tensor]:
    samples = whisper.speech(data_folder())
    return whisper.qkv(_fetch(whisper.MODEL), samples)


@functools.cache
def decoder_layers(length: int) -> tuple[tuple[Tensor, Tensor, Tensor], str]:
    words, source = smollm.text(data_folder())
    return smollm.qkv(_fetch(smollm.MODEL), words, length), source


def _fetch(model: minilm.Carried) -> Path:
    model.announce()
    return model.fetch()
