"""Tokens a second with drafts against without, for text that quotes, text that repeats nothing, and text that misleads.

    python -m benchmarks.drafts [--model llama-3.1-8b] [--batches 1 4 16 64 256] [--tokens 256] [--drafts 4]
                                [--policy auto always] [--cases quote novel mislead] [--options '{…}']

The model has its real shape and weights that were made up: attention and feed-forward add nothing, so that each token
is followed by the one that a permutation of the vocabulary says. Everything is computed as ever, and the text is known.
quote: the text runs in a circle that the prompt holds. novel: no token occurs twice. mislead: each two tokens of the
text stand in the prompt too, followed by another one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import results_file, workloads
from benchmarks.results_file import Row

CIRCLE = 384  # tokens
LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}


def followers(vocab_size: int) -> list[int]:
    """What follows each token: circles of CIRCLE tokens in the first half of the vocabulary, one of all the others."""
    half = vocab_size // 2 // CIRCLE * CIRCLE
    circles = [token + 1 if (token + 1) % CIRCLE else token + 1 - CIRCLE for token in range(half)]
    return [*circles, *range(half + 1, vocab_size), half]


def walk(model: Any) -> None:
    """Let each token be followed by the one that `followers` says."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0 if "norm" in name else 0.0)
        tokens = model.embed_tokens.weight
        tokens.normal_()
        index = torch.tensor(followers(len(tokens)), device=tokens.device)
        model.lm_head.weight.index_copy_(0, index, tokens)


def prompt(case: str, number: int, round_: int, tokens: int, follows: list[int]) -> list[int]:
    rng = random.Random(f"{case} {number} {round_}")
    half = len(follows) // 2 // CIRCLE * CIRCLE
    if case == "quote":
        circle = rng.randrange(half // CIRCLE) * CIRCLE
        start = rng.randrange(CIRCLE)
        return [circle + (start + i) % CIRCLE for i in range(CIRCLE + 8)]
    text = [rng.randrange(half, len(follows) - 3 * tokens)]
    if case == "novel":
        return [rng.randrange(half) for _ in range(CIRCLE)] + text
    for _ in range(tokens + 1):
        text.append(follows[text[-1]])
    wrong = [(one, two, rng.randrange(half)) for one, two in itertools.pairwise(text)]
    return [token for three in wrong for token in three] + text[:1]


class Bench:
    def __init__(self, folder: Path, options: dict[str, Any], speculative: dict[str, Any]) -> None:
        from quire import LLM

        self.llm = LLM(
            str(folder), load_format="dummy", skip_tokenizer_init=True, speculative_config=speculative,
            enable_prefix_caching=False, **options,
        )  # fmt: skip
        self.llm.apply_model(walk)
        self._follows = followers(self.llm.info.report.vocab_size)

    def generate(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds; the text must be the one that is known."""
        from quire import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        for ids, output in zip(prompts, outputs, strict=True):
            last = ids[-1]
            text = [last := self._follows[last] for _ in range(tokens)]
            assert output.outputs[0].token_ids == text, "the text is not the one that the weights say"
        return seconds

    def rate(self, case: str, batch: int, tokens: int) -> float:
        """Tokens a second of decode steps, median of three runs (the prompts' time taken off)."""
        rates = []
        for round_ in range(4):
            prompts = [prompt(case, number, round_, tokens, self._follows) for number in range(batch)]
            seconds = self.generate(prompts, tokens) - self.generate(prompts, 1)
            rates.append(batch * (tokens - 1) / seconds)
        return statistics.median(rates[1:])  # the first warms up

    def accepted(self) -> float:
        """Share of the drafts, so far."""
        stats = self.llm.call("stats")
        return float(stats.get("num_accepted_tokens", 0) / max(1, stats.get("num_draft_tokens", 0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="one of workloads.MODELS, or a folder with config.json")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--policy", nargs="+", default=["auto"], choices=["auto", "always"])
    parser.add_argument("--cases", nargs="+", default=["quote", "novel", "mislead"])
    parser.add_argument("--options", default="{}", help="engine options as a JSON object")
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    args = parser.parse_args()
    options = {"max_model_len": 4096, "max_num_seqs": max(args.batches), **json.loads(args.options)}
    found: dict[tuple[str, str, int], float] = {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.model)
        if not folder.is_dir():
            folder = workloads.write_model_dir(args.model, Path(scratch) / args.model)
        for policy in ("without", *args.policy):
            drafts = {"method": "ngram", "num_speculative_tokens": args.drafts, "policy": policy, **LOOKUP}
            bench = Bench(folder, options, {} if policy == "without" else drafts)
            if policy == "auto":
                for cost in bench.llm.info.report.draft_costs:
                    print(f"{cost.rows:4} rows: {cost.plain * 1e3:8.3f} ms, with drafts {cost.drafted * 1e3:8.3f}")
            for case in args.cases:
                for batch in args.batches:
                    rate = found[policy, case, batch] = bench.rate(case, batch, args.tokens)
                    ratio = rate / found["without", case, batch]
                    at = f"{case},{policy},batch={batch}"
                    rows.append(Row("drafts", args.model, at, "output_tok_s", round(rate, 1), "tok/s"))
                    rows.append(Row("drafts", args.model, at, "of_without", round(ratio, 3), "x"))
                    print(
                        f"{policy:8}{case:8}{batch:4} rows: {rate:10.1f} tokens/s, {ratio:5.3f} of without", flush=True
                    )
            if policy != "without":
                print(f"{policy:8}drafts accepted: {bench.accepted():.1%}")
            bench.llm.shutdown()
    device, command = bench.llm.info.report.device, " ".join(["python -m benchmarks.drafts", *sys.argv[1:]])
    settings = {**options, "drafts": args.drafts, "tokens": args.tokens, **LOOKUP}
    print(results_file.write(rows, device, command, settings, args.out, "drafts"))


if __name__ == "__main__":
    main()
