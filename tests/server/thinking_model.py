"""A model that thinks, for a second of making: a random Llama of two layers, the demo's tokenizer, a template in the
manner of Qwen3 that begins the reasoning for the model unless it is switched off."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import quire.demo_model

CONTEXT = 1024
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""


def make_thinking_model(folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    demo = Path(next(iter(quire.demo_model.__path__)))
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(demo / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE})
    )
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=4096,
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
        initializer_range=0.1,
        dtype="float32",
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 1.0}))
    return folder


if __name__ == "__main__":
    import sys

    make_thinking_model(Path(sys.argv[1]))
