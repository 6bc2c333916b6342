"""A model folder that costs a second to make: a random Qwen3 of two layers and a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

CONTEXT = 256
TEXT = """The quick brown fox jumps over the lazy dog. A quire is a gathering of pages; pages hold keys and values.
Hello, who are you? I am a small model. Once upon a time there was a house with many rooms and one door."""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if shout %}LOUD{% endif %}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_model(folder: Path) -> Path:
    """Write config.json, model.safetensors, tokenizer.json, tokenizer_config.json and generation_config.json."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE})
    )
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        initializer_range=0.4,  # large enough that greedy decoding does not settle on one token
        dtype="float32",
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 1.0}))
    return folder


if __name__ == "__main__":
    import sys

    make_model(Path(sys.argv[1]))
