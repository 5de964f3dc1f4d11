"""What a user of a converted model sees: embeddings and retrieval, a transcript, perplexity and generated text."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import require
from . import minilm, whisper
from .extras import LabError, need
from .models import data_folder
from .subjects import Subject, wikitext

BATCH = 16
NEW_TOKENS = 48
Results = dict[str, Any]


@dataclass
class Task:
    """`run` gives what the model says now; `compare` what a user would notice between the exact model's and a converted one's."""

    run: Callable[[], Any]
    compare: Callable[[Any, Any], Results]
    about: str
    exact: Any = None
    seconds: float = 0.0

    def measure(self) -> tuple[Results, float]:
        """Against the exact model's, which is whatever ran first."""
        start = time.perf_counter()
        with torch.no_grad():
            said = self.run()
        seconds = time.perf_counter() - start
        if self.exact is None:
            self.exact, self.seconds = said, seconds
        return self.compare(self.exact, said), seconds


# Embeddings and retrieval.


def retrieval(subject: Subject, documents: int = 500, length: int = minilm.LONGEST) -> Task:
    """Find a document's second half by its first: every half gives one window of `length` tokens, from 400 on."""
    texts = long_documents(subject, documents)
    halves = [half for ids in texts for half in (ids[:, :length], ids[:, -length:])]
    count = len(halves)

    def run() -> Tensor:
        return torch.cat([embed(subject, torch.cat(halves[first : first + BATCH])) for first in range(0, count, BATCH)])

    return Task(run, compare_embeddings, f"{documents} documents, {count} halves of {length} tokens: ACL papers")


def embed(subject: Subject, ids: Tensor) -> Tensor:
    states = subject.part(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
    return F.normalize(states.mean(1), dim=-1)


def compare_embeddings(exact: Tensor, got: Tensor) -> Results:
    cosine = (exact * got).sum(-1)
    return {"cosine": float(cosine.mean()), "cosine_least": float(cosine.min()), "top1": top1(got), "top1_exact": top1(exact)}


def top1(embeddings: Tensor) -> float:
    """Per cent of first halves whose nearest second half is their own."""
    first, second = embeddings[0::2], embeddings[1::2]
    found = (first @ second.mT).argmax(-1)
    return 100 * float((found == torch.arange(len(first))).float().mean())


def long_documents(subject: Subject, count: int) -> list[Tensor]:
    """Token ids of documents that hold two windows of 512 tokens."""
    data = data_folder()
    path = data / "acl_scisumm_docs.parquet" if data else None
    if path is None or not path.is_file():
        raise LabError("no documents: SCATTERBRAIN_DATA must name a folder that holds acl_scisumm_docs.parquet")
    table = need("pyarrow.parquet", "bench").read_table(path, columns=["text"])
    found: list[Tensor] = []
    for text in table["text"].to_pylist():
        text = re.sub(r"\s+", " ", text)
        # Enough of both ends; what lies between is not looked at.
        ids = torch.cat([subject.ids(text[:6000])[:, :512], subject.ids(text[-6000:])[:, -512:]], 1)
        if ids.shape[1] == 1024:
            found.append(ids)
        if len(found) == count:
            return found
    raise LabError(f"only {len(found)} of {count} documents are long enough; ask for fewer")


# Speech.


def transcript(subject: Subject) -> Task:
    samples = whisper.speech(data_folder()).numpy()

    def run() -> str:
        said = subject.model.transcribe(samples, fp16=False, temperature=0.0, language="en", condition_on_previous_text=False)
        return str(said["text"]).strip()

    return Task(run, compare_transcripts, "44 s of English speech")


def compare_transcripts(exact: str, got: str) -> Results:
    wanted, heard = exact.split(), got.split()
    wrong = edits(wanted, heard)
    return {"words": len(wanted), "wrong_words": wrong, "the_same": wanted == heard, "text": got[:400]}


def edits(a: list[Any], b: list[Any]) -> int:
    """Words to insert, delete or replace."""
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        above, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (word != other))
    return row[-1]


# Language.


def perplexity(subject: Subject, length: int = 2048, windows: int = 1) -> Task:
    """On the first `windows` x `length` tokens of WikiText-2 test, each window by itself."""
    ids = subject.ids(wikitext("test").strip()[: 12 * length * windows])[:, : length * windows]
    require(ids.shape[1] == length * windows, "length", "leave enough text", f"{ids.shape[1]} tokens", "ask for less")

    def run() -> float:
        losses = []
        for part in ids.split(length, 1):
            states = subject.part.model(input_ids=part, use_cache=False)[0][0, :-1]  # type: ignore[operator]
            # The logits of a long window at once would be the largest thing in memory.
            pieces = zip(states.split(1024), part[0, 1:].split(1024), strict=True)
            losses += [F.cross_entropy(subject.part.lm_head(s).float(), t, reduction="none") for s, t in pieces]  # type: ignore[operator]
        return float(torch.cat(losses).mean().exp())

    about = f"the first {windows * length:,} tokens of WikiText-2 test, {windows} window{'s' * (windows > 1)} of {length:,}"
    return Task(run, lambda exact, got: {"perplexity": got, "perplexity_exact": exact}, about)


def generation(subject: Subject, prompts: int = 10, length: int = 1024, new: int = NEW_TOKENS) -> Task:
    """Greedy continuation of prompts of 1,000 tokens and more, the prompt approximated."""
    articles = minilm.wikitext_articles(wikitext("test"))
    ids = torch.cat([feed["input_ids"] for feed in subject.windows(articles, length, prompts)])

    def run() -> Tensor:
        out = subject.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1)
        return out[:, length:]

    def compare(exact: Tensor, got: Tensor) -> Results:
        same = exact == got
        until = same.long().cumprod(1).sum(1).float()
        samples = [subject.tokenizer.decode(row[:24]) for row in got[:2]]
        return {
            "new_tokens": new,
            "same_until": float(until.mean()),
            "same_first": int(same[:, 0].sum()),
            "whole": int(same.all(1).sum()),
            "text": samples,
        }

    return Task(run, compare, f"{prompts} prompts of {length:,} tokens, {new} new ones each")


TASKS: dict[str, dict[str, Callable[[Subject], Task]]] = {
    "minilm": {"retrieval": retrieval},
    "whisper": {"transcript": transcript},
    "smollm2": {
        "perplexity 2,048": perplexity,
        "generation": generation,
        "perplexity 8,192": lambda subject: perplexity(subject, 8192, 1),
    },
}
