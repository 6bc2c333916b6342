"""Train the demo model from scratch in one short run on one GPU, and write it as a Hugging Face model folder.

python -m demo.train --out build/quire-demo --minutes 8
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo import chat
from demo import tokenizer as tokenizer_files
from demo.model import HAS_VARLEN, ModelConfig, Packing, Qwen3
from demo.packing import Batch, Feed


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--minutes", type=float, default=8.0, help="wall-clock budget, start-up included")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.5, help="final share of the run over which lr falls to 0")
    parser.add_argument("--warmup", type=int, default=300, help="steps")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=ModelConfig.num_hidden_layers)
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args(arguments)


def learning_rate(peak: float, step: int, warmup: int, progress: float, decay: float) -> float:
    """Linear warm-up by steps, then flat, then linear to zero by wall-clock."""
    return peak * min(1.0, (step + 1) / warmup, max(0.0, (1.0 - progress) / decay))


def to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Packing]:
    def move(array: object) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    starts, positions = move(batch.starts), move(batch.positions)
    mask = None
    if device.type != "cuda" or not HAS_VARLEN:
        document = torch.searchsorted(starts, torch.arange(len(batch.ids), device=device), right=True)
        mask = (document[:, None] == document[None, :]).tril()
    packing = Packing(positions, starts, mask)
    return move(batch.ids), move(batch.targets).long(), move(batch.weights), packing


def optimizer(model: Qwen3, lr: float, device: torch.device) -> torch.optim.AdamW:
    """AdamW, with weight decay on the matrices only."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), eps=1e-9, fused=device.type == "cuda")


def save(model: Qwen3, tokenizer: Tokenizer, folder: Path) -> None:
    """Weights in bf16, under the names and beside the files that Hugging Face expects."""
    weights = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    vocabulary = tokenizer.get_vocab()
    eos = [vocabulary[chat.IM_END], vocabulary[chat.END_OF_TEXT]]
    config = model.hf_config(eos, pad=eos[1])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": eos[1], "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer_files.save(tokenizer, folder)


def main(arguments: list[str] | None = None) -> None:
    began = time.monotonic()
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "tokenizer.json"
    if not path.exists():
        tokenizer_files.save(tokenizer_files.train(), options.out)
        print(f"tokenizer trained in {time.monotonic() - began:.0f} s", flush=True)
    tokenizer = Tokenizer.from_file(str(path))

    feed = Feed(str(path), options.tokens, options.workers, options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    config = ModelConfig(vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=options.layers)
    model = Qwen3(config, dtype).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)
    adam = optimizer(model, options.lr, device)
    loss_of = model if options.no_compile else torch.compile(model)

    step, logged, trained_from, running = 0, 0, 0.0, torch.zeros((), device=device)
    deadline = began + 60 * options.minutes
    while True:
        now = time.monotonic()
        progress = (now - trained_from) / (deadline - trained_from) if step else 0.0
        if progress >= 1.0 or now >= deadline:
            break
        rate = learning_rate(options.lr, step, options.warmup, progress, options.decay)
        for group in adam.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
            loss = loss_of(*to_device(feed.next(), device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        adam.step()
        adam.zero_grad(set_to_none=True)
        running += loss.detach()
        if step == 0:
            first = loss.item()
            trained_from = time.monotonic()
            print(f"first step after {trained_from - began:.0f} s, loss {first:.3f}", flush=True)
        step += 1
        if step - logged == 250 or step in (10, 50):
            mean = running.item() / (step - logged + (logged == 0))
            running.zero_()
            elapsed = time.monotonic() - trained_from
            print(
                f"step {step:6d}  loss {mean:.4f}  lr {rate:.2e}"
                f"  {step * options.tokens / elapsed / 1e6:.2f} Mtok/s"
                f"  {100 * progress:3.0f} %  fresh {feed.fresh} repeated {feed.repeated}",
                flush=True,
            )
            logged = step
    feed.close()
    save(model, tokenizer, options.out)
    seconds = time.monotonic() - trained_from
    print(
        f"{step} steps, {step * options.tokens / 1e9:.3f} G tokens in {seconds:.0f} s "
        f"({feed.fresh} fresh batches, {feed.repeated} repeated); saved to {options.out}",
        flush=True,
    )


if __name__ == "__main__":
    main()
