"""Score the demo model in every weight format that can be made of it here: by the engine while it loads, or by the
libraries of GGUF, TorchAO and HQQ.

python -m demo.formats [--per-skill 60] [--skills facts …] [--only int4 …] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from demo import corpus
from demo.eval import evaluate_at_once, quire_generate

MODEL = Path(__file__).resolve().parents[1] / "quire" / "demo_model"
ONLINE = ("fp8", "fp8_block", "int8", "int4", "mxfp4", "nvfp4", "nf4")
GGUF = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4")
TORCHAO = ("int8", "fp8", "int4")
HQQ = (8, 4, 3)
NAMES = {
    "embed_tokens": "token_embd", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    "norm": "output_norm",
}  # fmt: skip


def cases() -> dict[str, Callable[[Path], tuple[Path, str | None]]]:
    """By name: what makes a folder or file of the model in it, and the option `quantization`."""
    found: dict[str, Callable[[Path], tuple[Path, str | None]]] = {"bf16": lambda _: (MODEL, None)}
    found |= {name: lambda _, name=name: (MODEL, name) for name in ONLINE}  # type: ignore[misc]
    found |= {f"gguf {kind}": lambda folder, kind=kind: (as_gguf(folder, kind), None) for kind in GGUF}  # type: ignore[misc]
    found |= {f"torchao {kind}": lambda folder, kind=kind: (by_torchao(folder, kind), None) for kind in TORCHAO}  # type: ignore[misc]
    found |= {f"hqq {bits} bits": lambda folder, bits=bits: (by_hqq(folder, bits), None) for bits in HQQ}  # type: ignore[misc]
    return found


def state() -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor.float() for name, tensor in load_file(MODEL / "model.safetensors").items()}


def as_gguf(folder: Path, kind: str) -> Path:
    """By the format's own quantiser; norms stay float32, and embeddings, which are the head too, have 8 bits."""
    import gguf

    config = json.loads((MODEL / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / "demo.gguf", "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    tokenizer = (MODEL / "tokenizer.json").read_text()
    vocabulary = json.loads(tokenizer)["model"]["vocab"]
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_string("tokenizer.huggingface.json", tokenizer)
    writer.add_eos_token_id(2)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 0)
    for name, tensor in state().items():
        *path, module, end = name.split(".")
        wanted = gguf.GGMLQuantizationType["F32" if tensor.dim() == 1 else "Q8_0" if "embed" in name else kind]
        layer = f"blk.{path[2]}." if "layers" in path else ""
        writer.add_tensor(
            f"{layer}{NAMES[module]}.{end}", gguf.quants.quantize(tensor.numpy(), wanted), raw_dtype=wanted
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "demo.gguf"


def by_torchao(folder: Path, kind: str) -> Path:
    import torch
    import torchao.quantization as q
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    config = {
        "int8": q.Int8WeightOnlyConfig,
        "fp8": q.Float8WeightOnlyConfig,
        "int4": lambda: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=q.PerGroup(64)),
    }[kind]()

    def pack(module: str, linear: Any) -> dict[str, Any]:
        q.quantize_(linear, config)
        flat, _ = flatten_tensor_state_dict({f"{module}.weight": linear.weight})
        return dict(flat)

    return _packed(folder, pack, {"quant_method": "torchao", "quant_type": {"default": config_to_dict(config)}})


def by_hqq(folder: Path, bits: int) -> Path:
    import torch
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=bits, group_size=64, axis=1)

    def pack(module: str, linear: Any) -> dict[str, Any]:
        made = HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
        return {f"{module}.{name}": tensor for name, tensor in made.state_dict().items() if tensor is not None}

    return _packed(folder, pack, {"quant_method": "hqq", "quant_config": config})


def _packed(folder: Path, pack: Callable[[str, Any], dict[str, Any]], config: dict[str, Any]) -> Path:
    """pack: a module's name and the linear layer of its weight → tensors by name."""
    import torch
    from safetensors.torch import save_file

    out = shutil.copytree(MODEL, folder / "packed", ignore=shutil.ignore_patterns("*.safetensors"))
    packed = {}
    for name, tensor in state().items():
        if "_proj" not in name:
            packed[name] = tensor.bfloat16()
            continue
        linear = torch.nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(tensor, requires_grad=False)
        packed |= pack(name.removesuffix(".weight"), linear)
    save_file({name: tensor.contiguous() for name, tensor in packed.items()}, out / "model.safetensors")
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-skill", type=int, default=60)
    parser.add_argument("--skills", nargs="+", choices=tuple(corpus.SKILLS), default=list(corpus.SKILLS))
    parser.add_argument("--only", nargs="+", choices=list(cases()))
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    rows: dict[str, dict[str, Any]] = {}
    print("| format | correct | of | % | MiB |\n| --- | ---: | ---: | ---: | ---: |")
    for name, make in cases().items():
        if options.only and name not in options.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model, quantization = make(Path(folder))
            began = time.monotonic()
            generate, size = quire_generate(model, quantization, show=False)
            scores = evaluate_at_once(generate, tokenizer, options.per_skill, 0, options.skills)
        correct, total = (sum(getattr(score, key) for score in scores.values()) for key in ("correct", "total"))
        percent = round(100 * correct / total, 2)
        rows[name] = {
            "correct": correct, "of": total, "percent": percent, "weight_bytes": size,
            "seconds": round(time.monotonic() - began, 1),
            "skills": {skill: score.percent for skill, score in scores.items()},
        }  # fmt: skip
        print(f"| {name} | {correct} | {total} | {percent:.1f} | {size / 2**20:.2f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"per_skill": options.per_skill, "formats": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
