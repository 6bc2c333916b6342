"""Prompts a second of an embedding model on a CPU, beside transformers on the same machine.

    python -m benchmarks.embeddings MODEL_FOLDER [--prompts 512] [--rounds 3] [--write]

MODEL_FOLDER: for instance all-MiniLM-L6-v2. Two kinds of work: texts of 5 to 60 words, and of 200. transformers gets
what sentence-transformers gives it: batches of 32, sorted by length, padded to the longest. Both in float32, on the
same threads, taking turns; tokenising is part of it. The median of the rounds is reported. With one thread the
processor's time counts, not the clock's, so that a busy machine matters little.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import results_file
from benchmarks.results_file import Row

WORDS = [f"{sound}{end}" for sound in ("ba", "co", "di", "fu", "la", "mo", "ni") for end in ("", "n", "rk", "ster")]
BATCH = 32


def texts(dice: random.Random, count: int, low: int, high: int) -> list[str]:
    return [" ".join(dice.choices(WORDS, k=dice.randint(low, high))) for _ in range(count)]


def with_transformers(folder: str, threads: int, most: int) -> Callable[[list[str]], Any]:
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(threads)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float().eval()

    def embed(given: list[str]) -> list[Any]:
        torch.set_num_threads(threads)
        order = sorted(range(len(given)), key=lambda i: -len(given[i]))
        found: list[Any] = [None] * len(given)
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            batch = tokenizer(
                [given[i] for i in part], padding=True, truncation=True, max_length=most, return_tensors="pt"
            )
            with torch.inference_mode():
                states = model(**batch).last_hidden_state
                mask = batch["attention_mask"].unsqueeze(-1).float()
                vectors = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
            for i, vector in zip(part, vectors.tolist(), strict=True):
                found[i] = vector
        return found

    return embed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None, help="default: what the engine takes by itself")
    parser.add_argument("--write", action="store_true", help="write a file to benchmarks/results")
    args = parser.parse_args()
    import torch

    from quire import LLM

    dice = random.Random(0)
    rows: list[Row] = []
    with LLM(args.model, device="cpu", dtype="float32", num_threads=args.threads) as llm:
        threads = torch.get_num_threads()
        clock = time.process_time if threads == 1 else time.perf_counter
        peer = with_transformers(args.model, threads, llm.info.max_model_len)

        def ours(given: list[str]) -> list[Any]:
            outputs = llm.embed(given, use_tqdm=False, truncate_prompt_tokens=-1)
            return [output.outputs.embedding for output in outputs]

        for case, low, high in (("5-60 words", 5, 60), ("200 words", 200, 200)):
            count = args.prompts if high < 100 else args.prompts // 4
            seconds: dict[str, list[float]] = {"quire": [], "transformers": []}
            for round_ in range(args.rounds + 1):
                given = texts(dice, count, low, high)
                answers = {}
                for name, run in (("quire", ours), ("transformers", peer)):
                    began = clock()
                    answers[name] = run(given)
                    if round_:
                        seconds[name].append(clock() - began)
                worst = max(
                    abs(a - b)
                    for one, other in zip(answers["quire"], answers["transformers"], strict=True)
                    for a, b in zip(one, other, strict=True)
                )
                assert worst < 1e-4, f"the vectors differ by {worst}"
            rates = {name: count / statistics.median(times) for name, times in seconds.items()}
            model = args.model.rstrip("/").rpartition("/")[2]
            values = round(rates["quire"], 1), "prompts/s", None, round(rates["transformers"], 1)
            rows.append(Row("embeddings", model, case, "prompts_s", *values))
            print(
                f"{case:12} quire {rates['quire']:8.1f}   transformers {rates['transformers']:8.1f} prompts/s",
                flush=True,
            )
        device = llm.info.report.device
    print(results_file.table(rows))
    if args.write:
        command = " ".join(["python -m benchmarks.embeddings", *sys.argv[1:]])
        print(results_file.write(rows, device, command, {"batch of transformers": BATCH, "threads": threads}))


if __name__ == "__main__":
    main()
