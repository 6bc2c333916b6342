"""Do two ways of running the demo model say the same? Counts the held-out prompts with identical greedy answers.

python -m demo.agreement                                  GPU bf16 against CPU float32, all held-out prompts
python -m demo.agreement --other device=cpu,dtype=bfloat16
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from demo import chat, corpus
from demo.eval import MAX_NEW_TOKENS

REFERENCE = "device=cpu,dtype=float32"
MODEL = Path(__file__).parents[1] / "quire" / "demo_model"


def answers(prompts: list[list[int]], options: dict[str, Any]) -> list[list[int]]:
    """Greedy answers of Quire with these options, in order."""
    from quire import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS, detokenize=False)
    with LLM(str(MODEL), skip_tokenizer_init=True, **options) as llm:
        results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [result.outputs[0].token_ids for result in results]


def parse(text: str) -> dict[str, Any]:
    """ "name=value,…" → engine options."""
    return dict(part.split("=", 1) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", default="device=cuda,dtype=bfloat16", help="engine options, name=value,…")
    parser.add_argument("--per-skill", type=int, default=200)
    parser.add_argument("--bar", type=float, default=99.0, help="percent of identical answers below which to fail")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tasks = {skill: corpus.heldout(skill, options.per_skill, 0) for skill in corpus.SKILLS}
    prompts = [
        tokenizer.encode(chat.prompt_text(t.messages, t.tools, t.thinking)).ids for ts in tasks.values() for t in ts
    ]
    reference, other = answers(prompts, parse(REFERENCE)), answers(prompts, parse(options.other))
    same = [a == b for a, b in zip(reference, other, strict=True)]
    counts: dict[str, int] = {}
    at = 0
    for skill, ts in tasks.items():
        counts[skill] = sum(same[at : at + len(ts)])
        at += len(ts)
        print(f"{skill:12}{counts[skill]:5} of {len(ts)} answers are identical")
    percent = 100 * sum(same) / len(same)
    print(f"{percent:.2f} % of {len(same)} prompts: {options.other} against {REFERENCE}")
    if options.json:
        report = {"other": options.other, "reference": REFERENCE, "percent": percent, "identical": counts}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(percent < options.bar)


if __name__ == "__main__":
    main()
