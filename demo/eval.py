"""Score a demo model on held-out prompts, skill by skill, with greedy decoding.

python -m demo.eval --model quire/demo_model --engine quire [--quantization fp8]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from demo import chat, corpus
from demo.task import Task

Generate = Callable[[list[list[int]]], list[list[int]]]
MAX_NEW_TOKENS = 320


@dataclass
class Score:
    """How one skill went, with the answers that were wrong."""

    correct: int = 0
    total: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)

    @property
    def percent(self) -> float:
        return 100.0 * self.correct / max(1, self.total)


def evaluate(
    generate: Generate,
    tokenizer: Tokenizer,
    per_skill: int = 200,
    seed: int = 0,
    skills: Sequence[str] = tuple(corpus.SKILLS),
) -> dict[str, Score]:
    """Ask every held-out question; `generate` maps prompts to new tokens, in order, end markers optional."""
    scores = {}
    for skill in skills:
        scores |= evaluate_at_once(generate, tokenizer, per_skill, seed, [skill])
    return scores


def evaluate_at_once(
    generate: Generate, tokenizer: Tokenizer, per_skill: int, seed: int, skills: Sequence[str]
) -> dict[str, Score]:
    """The same with the questions of all skills in one call."""
    tasks = [task for skill in skills for task in corpus.heldout(skill, per_skill, seed)]
    prompts = [tokenizer.encode(chat.prompt_text(t.messages, t.tools, t.thinking)).ids for t in tasks]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in generate(prompts)]
    every = len(tasks) // len(skills)
    parts = {skill: slice(number * every, (number + 1) * every) for number, skill in enumerate(skills)}
    return {skill: _score(tasks[part], texts[part]) for skill, part in parts.items()}


def _score(tasks: list[Task], texts: list[str]) -> Score:
    score = Score(total=len(tasks))
    for task, text in zip(tasks, texts, strict=True):
        if corpus.is_correct(task, text):
            score.correct += 1
        else:
            asked = task.messages[-1]["content"]
            score.failures.append({"asked": asked, "wanted": corpus.target_text(task), "got": text})
    return score


def table(scores: dict[str, Score]) -> str:
    """The scores as a Markdown table."""
    lines = ["| skill | correct | of | % |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| {skill} | {s.correct} | {s.total} | {s.percent:.1f} |" for skill, s in scores.items()]
    return "\n".join(lines)


def transformers_generate(folder: Path, device: str, batch_size: int = 256) -> Generate:
    """The reference: Hugging Face transformers, prompts of similar length padded on the left together."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model = model.to(device).eval()
    stops, pad = set(model.generation_config.eos_token_id), model.generation_config.pad_token_id

    @torch.inference_mode()
    def generate(prompts: list[list[int]]) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for at in range(0, len(order), batch_size):
            rows = order[at : at + batch_size]
            width = max(len(prompts[i]) for i in rows)
            ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in rows], device=device)
            lengths = torch.tensor([len(prompts[i]) for i in rows], device=device)
            mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
            result = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            for i, row in zip(rows, result[:, width:].tolist(), strict=True):
                end = next((n for n, token in enumerate(row) if token in stops), len(row))
                outputs[i] = row[:end]
        return outputs

    return generate


def quire_generate(folder: Path, quantization: str | None = None, *, show: bool = True) -> tuple[Generate, int]:
    """The same through Quire, and the bytes of its weights. show: progress."""
    from quire import LLM, SamplingParams

    llm = LLM(model=str(folder), quantization=quantization, use_tqdm_on_load=show, max_num_seqs=512)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS)
        results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=show)
        return [list(result.outputs[0].token_ids) for result in results]

    return generate, llm.info.report.weight_bytes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", choices=("transformers", "quire"), default="transformers")
    parser.add_argument("--per-skill", type=int, default=200)
    parser.add_argument("--skills", nargs="+", choices=tuple(corpus.SKILLS), default=list(corpus.SKILLS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="for transformers: cpu or cuda")
    parser.add_argument("--quantization", help="for quire: see the option of that name")
    parser.add_argument("--show", type=int, default=0, help="print this many failures per skill")
    parser.add_argument("--json", type=Path, help="also write scores and failures to this file")
    options = parser.parse_args(arguments)

    quire = options.engine == "quire"
    if quire:
        generate, _ = quire_generate(options.model, options.quantization)
    else:
        generate = transformers_generate(options.model, options.device)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    began = time.monotonic()
    scores = evaluate(generate, tokenizer, options.per_skill, options.seed, options.skills)
    print(table(scores))
    print(f"{time.monotonic() - began:.1f} s with {options.engine}")
    for skill, score in scores.items():
        for failure in score.failures[: options.show]:
            print(f"--- {skill}: {failure['asked']}\nwanted: {failure['wanted']}\ngot:    {failure['got']}")
    if options.json:
        report = {skill: {"percent": s.percent, **vars(s)} for skill, s in scores.items()}
        options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
