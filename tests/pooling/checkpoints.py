"""Tiny random encoders and decoders saved by transformers, with tokenizers, and what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCAB = 151
WORDS = [f"w{i}" for i in range(VOCAB - 8)]
SPECIAL = ["<pad>", "<x>", "<s>", "</s>", "<unk>", "<y>", "<z>", "<q>"]
ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
}
DECODER = {**ENCODER, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128}


def make(architecture: str, folder: Path, seed: int = 0, **config: Any) -> Any:
    """A float32 model whose outputs depend on every token, saved with a tokenizer. Returns transformers' own."""
    family = next(
        name
        for name in ("XLMRoberta", "Roberta", "Bert", "Qwen3", "Qwen2", "Llama", "Mistral", "Gemma3Text", "GPT2")
        if architecture.startswith(name)
    )
    sizes = ENCODER if "B" in family or "R" in family else DECODER
    own = {"n_inner": 72, "bos_token_id": 2, "eos_token_id": 3} if family == "GPT2" else {}
    made = getattr(transformers, f"{family}Config")(**{**sizes, **own, **config})
    made._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(made).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5).sub_(1 if family == "Gemma3Text" else 0)
            else:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder, pairs="roberta" if "Roberta" in family else "bert" if family == "Bert" else "")
    return model


def save_tokenizer(folder: Path, pairs: str) -> None:
    """One word, one token. pairs: how texts are framed, as BERT or RoBERTa does; "": not at all."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if pairs:
        second = "<s> $A </s> $B:1 </s>:1" if pairs == "bert" else "<s> $A </s> </s> $B </s>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair=second, special_tokens=[("<s>", 2), ("</s>", 3)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))


def sentence_transformers(
    folder: Path,
    *modules: str,
    dense: list[torch.nn.Linear] | None = None,
    kinds: str = "sentence_transformers.models",
    activation: str = "Tanh",
    **pooling: Any,
) -> None:
    """Write modules.json. modules: of "Pooling", "Dense", "Normalize", in order; pooling: its config. activation: of
    dense layers."""
    from safetensors.torch import save_file

    layers = iter(dense or [])
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, kind in enumerate(modules, 1):
        path = f"{index}_{kind}"
        listed.append({"idx": index, "name": str(index), "path": path, "type": f"{kinds}.{kind}"})
        (folder / path).mkdir(exist_ok=True)
        if kind in ("Pooling", "SpladePooling"):
            (folder / path / "config.json").write_text(json.dumps(pooling))
        if kind == "Dense":
            layer = next(layers)
            save_file(
                {"linear.weight": layer.weight.detach(), "linear.bias": layer.bias.detach()},
                folder / path / "model.safetensors",
            )
            config = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": True}
            config["activation_function"] = f"torch.nn.modules.activation.{activation}"
            (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def states(model: Any, ids: list[int], token_types: list[int] | None = None) -> torch.Tensor:
    """transformers' last hidden states, [tokens, hidden]."""
    with torch.inference_mode():
        trunk = model.base_model
        options = {} if token_types is None else {"token_type_ids": torch.tensor([token_types])}
        return trunk(torch.tensor([ids]), **options).last_hidden_state[0]
