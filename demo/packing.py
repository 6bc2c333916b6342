"""Turn documents into fixed-size batches of packed tokens, in worker processes beside the training loop."""

from __future__ import annotations

import multiprocessing as mp
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo import corpus
from demo.chat import Segment

CONTEXT_WEIGHT = 0.1  # what the user wrote is worth learning a little, to get a feel for the language
MAX_LENGTH = 2048
MAX_DOCUMENTS = 1024  # per batch; unused places are filled with empty documents


@dataclass
class Batch:
    """One step's tokens. `starts` has MAX_DOCUMENTS + 1 entries, so that every batch has the same shape."""

    ids: NDArray[np.int32]
    targets: NDArray[np.int32]
    weights: NDArray[np.float32]
    positions: NDArray[np.int32]
    starts: NDArray[np.int32]


def encode(tokenizer: Tokenizer, documents: list[list[Segment]]) -> Iterator[tuple[list[int], list[float]]]:
    """Ids and loss weights of documents, each encoded piece by piece as it will be at inference.

    The first token of an earlier answer has no weight: unlike in a new answer, no thinking came before it.
    """
    pieces = tokenizer.encode_batch([segment.text for document in documents for segment in document])
    at = 0
    for document in documents:
        ids: list[int] = []
        weights: list[float] = []
        for segment, piece in zip(document, pieces[at : at + len(document)], strict=True):
            weight = CONTEXT_WEIGHT if segment.role == "prompt" else 1.0
            start = len(ids)
            ids += piece.ids
            weights += [weight] * len(piece.ids)
            if segment.role == "history":
                weights[start] = 0.0
        at += len(document)
        yield ids, weights


def batches(tokenizer: Tokenizer, tokens: int, rng: Random) -> Iterator[Batch]:
    """Endless fresh batches; a document that does not fit opens the next one."""
    ids: list[int] = []
    weights: list[float] = []
    lengths: list[int] = []
    while True:
        for new_ids, new_weights in encode(tokenizer, [corpus.document(rng) for _ in range(256)]):
            if len(new_ids) > min(MAX_LENGTH, tokens):
                continue
            if len(ids) + len(new_ids) > tokens or len(lengths) == MAX_DOCUMENTS - 1:
                yield _pack(ids, weights, lengths, tokens)
                ids, weights, lengths = [], [], []
            ids += new_ids
            weights += [0.0, *new_weights[1:]]
            lengths.append(len(new_ids))


def _pack(ids: list[int], weights: list[float], lengths: list[int], tokens: int) -> Batch:
    rest = tokens - len(ids)
    flat = np.array(ids + [0] * rest, dtype=np.int32)
    weight = np.array(weights + [0.0] * rest, dtype=np.float32)
    spans = lengths + [min(MAX_LENGTH, rest - done) for done in range(0, rest, MAX_LENGTH)]
    starts = np.full(MAX_DOCUMENTS + 1, tokens, dtype=np.int32)
    starts[: len(spans) + 1] = np.concatenate(([0], np.cumsum(spans)))
    return Batch(
        ids=flat,
        targets=np.roll(flat, -1),
        weights=np.roll(weight, -1),
        positions=np.concatenate([np.arange(span, dtype=np.int32) for span in spans]),
        starts=starts,
    )


def _work(path: str, tokens: int, seed: str, out: mp.Queue[Batch]) -> None:
    for batch in batches(Tokenizer.from_file(path), tokens, Random(seed)):
        out.put(batch)


class Feed:
    """Batches from worker processes. When they fall behind, an earlier batch is repeated, without waiting."""

    def __init__(self, tokenizer_path: str, tokens: int, workers: int, seed: int, keep: int = 2000) -> None:
        context = mp.get_context("spawn")
        self.queue: mp.Queue[Batch] = context.Queue(maxsize=400)
        self.kept: list[Batch] = []
        self.keep, self.fresh, self.repeated, self.rng = keep, 0, 0, Random(seed)
        self.workers = [
            context.Process(target=_work, args=(tokenizer_path, tokens, f"{seed}/{i}", self.queue), daemon=True)
            for i in range(workers)
        ]
        for worker in self.workers:
            worker.start()

    def next(self) -> Batch:
        try:
            batch = self.queue.get(block=not self.kept, timeout=120)
        except queue.Empty:
            if not self.kept:
                raise
            self.repeated += 1
            return self.rng.choice(self.kept)
        self.fresh += 1
        if len(self.kept) < self.keep:
            self.kept.append(batch)
        else:
            self.kept[self.rng.randrange(self.keep)] = batch
        return batch

    def close(self) -> None:
        for worker in self.workers:
            worker.terminate()
