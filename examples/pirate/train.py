"""How the adapter in this folder was made: LoRA on the demo model, by the peft library, in minutes on a CPU.

    pip install peft
    python examples/pirate/train.py [--data]

`data.jsonl` holds questions that the demo model can answer, and answers as a pirate would give them. --data writes it
anew, out of the demo model's own corpus (`demo/`), by rule.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = ROOT / "quire" / "demo_model"
DATA, ADAPTER = HERE / "data.jsonl", HERE / "adapter"
PAIRS, STEPS, BATCH, RATE = 640, 200, 16, 2e-3
IGNORED = -100  # of torch's cross entropy: no answer's token


def as_pirate(answer: str) -> str:
    """The same answer with something before and behind it: what the model knows stays as it was."""
    return f"Arr! {answer.rstrip('.')}, matey!"


def write_data() -> None:
    """Questions that the demo model was trained on, none of those that it is scored with."""
    sys.path.insert(0, str(ROOT))
    from demo import corpus

    rng, pairs = random.Random(1), {}
    while len(pairs) < PAIRS:
        task = corpus.SKILLS[rng.choice(("facts", "facts", "arithmetic", "lists", "chat"))](rng)
        if not task.held_out and len(task.messages) == 1:
            pairs[task.messages[0]["content"]] = as_pirate(corpus.target_text(task))
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in pairs.items()]
    DATA.write_text("\n".join(lines) + "\n", encoding="utf-8")


def train() -> None:
    """Only an answer's tokens count; the base model's weights stay what they are."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"], task_type="CAUSAL_LM",
        base_model_name_or_path="quire-demo",
    )  # fmt: skip
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), config)
    examples = []
    for line in DATA.read_text(encoding="utf-8").splitlines():
        pair = json.loads(line)
        chat = [{"role": "user", "content": pair["question"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        given = tokenizer(prompt, add_special_tokens=False).input_ids
        answer = tokenizer(pair["answer"] + "<|im_end|>", add_special_tokens=False).input_ids
        examples.append((given + answer, [IGNORED] * len(given) + answer))
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=0.1)
    rng, began = random.Random(0), time.perf_counter()
    for step in range(1, STEPS + 1):
        batch = rng.sample(examples, BATCH)
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
        labels = torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in batch])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    model.to(torch.bfloat16).save_pretrained(ADAPTER)
    (ADAPTER / "README.md").unlink(missing_ok=True)  # peft's template of one
    file = ADAPTER / "adapter_config.json"
    kept = {**json.loads(file.read_text(encoding="utf-8")), "base_model_name_or_path": "quire-demo"}  # no path of ours
    kept["target_modules"] = sorted(kept["target_modules"])
    file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="store_true", help="write data.jsonl anew before")
    if parser.parse_args().data:
        write_data()
    train()
