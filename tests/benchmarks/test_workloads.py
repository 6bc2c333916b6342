"""The compared work must never drift: figures of different dates and engines stand on equal token ids."""

from __future__ import annotations

import hashlib
import json
import math

import pytest

from benchmarks import workloads

DIGESTS = {
    "t1(0)": "68203ba01da1ced279a5c112aac7169b",
    "t1(1)": "1ed7f0f13ed4b1ca8f8beeeef6550f60",
    "t1b(0)": "37cde68c7756dd91ceb4df39fb512973",
    "t1b(1)": "1ca020ac1ec3649741d5fcc59af5c56f",
    "warmup()": "bdd61f198a1f9f087637f0ce39d0efbe",
    "t2(1)": "5fb1215ffa7c17949be94a82f1c1364e",
    "t2(8)": "9e4f7a191b021db93adee0996d7b088a",
    "t2(64, 2)": "e70ba2328e7aed2590bbf5cd87c26a09",
    "t3(1024)": "17ce828d48c4e577950e3f96e2bf183b",
    "t3(4096, 16)": "48f258ee50fe168558c4bf920f9e712f",
    "t4(1)": "ac763cfaacd94f03ef02b1bda285e745",
    "t5(16)": "6c43d3335de669d1bb2864364917b62d",
    "t5(inf)": "016f23ba338b916e48775f2265cb65ea",
}

CALLS = {
    "t1(0)": lambda: workloads.t1(0),
    "t1(1)": lambda: workloads.t1(1),
    "t1b(0)": lambda: workloads.t1b(0),
    "t1b(1)": lambda: workloads.t1b(1),
    "warmup()": workloads.warmup,
    "t2(1)": lambda: workloads.t2(1),
    "t2(8)": lambda: workloads.t2(8),
    "t2(64, 2)": lambda: workloads.t2(64, 2),
    "t3(1024)": lambda: workloads.t3(1024),
    "t3(4096, 16)": lambda: workloads.t3(4096, 16),
    "t4(1)": lambda: workloads.t4(1),
    "t5(16)": lambda: workloads.t5(16),
    "t5(inf)": lambda: workloads.t5(math.inf),
}


@pytest.mark.parametrize("call", DIGESTS)
def test_digest(call: str) -> None:
    text = json.dumps(CALLS[call]())
    assert hashlib.sha256(text.encode()).hexdigest()[:32] == DIGESTS[call]


def test_floors_count_every_byte_and_operation() -> None:
    weights, kv = workloads.decode_bytes("llama-3.1-8b", batch=8, context=256)
    assert weights == 15_009_316_864
    assert kv == 8 * 256 * 131_072  # 32 layers x 8 heads x 128 x 2 (k, v) x 2 bytes
    assert workloads.prefill_flops("qwen3-0.6b", 1, 1) > 2 * 28 * 1024 * 3072 * 3
    weights, kv = workloads.decode_bytes("deepseek-v2-lite", batch=64, context=8192)
    assert kv == 64 * 8192 * 27 * (512 + 64) * 2
    assert 30e9 < weights < 33e9  # nearly all experts are hit


def test_floors_of_heads() -> None:
    """Quantized while they load they have 8 bits, unless they are the embedding."""

    def of(model: str) -> int:
        moved: int = workloads.decode_bytes(model, 1, 1)[0]
        return moved

    layers = {"llama-3.1-8b": 6_979_321_856, "qwen3-0.6b": 440_401_920}
    heads = {"llama-3.1-8b": 128_256 * 4096, "qwen3-0.6b": 151_936 * 1024}
    assert {model: of(f"{model}+fp8") for model in layers} == {
        "llama-3.1-8b": layers["llama-3.1-8b"] + heads["llama-3.1-8b"],
        "qwen3-0.6b": layers["qwen3-0.6b"] + 2 * heads["qwen3-0.6b"],
    }


def test_a_published_format_leaves_attention_as_it_is() -> None:
    """gpt-oss in MXFP4 has its experts in codes alone; its bytes say so."""
    model = "gpt-oss-20b+mxfp4"
    assert workloads.config_of(model)["quantization_config"]["quant_method"] == "mxfp4"
    assert "quantization_config" not in workloads.config_of("gpt-oss-20b")
    config, (attention, _, _) = workloads.config_of(model), workloads.attention_of(model)
    experts, head = workloads.feed_forward(model, 8), 2 * config["vocab_size"] * config["hidden_size"]
    of_layers = config["num_hidden_layers"] * (2 * attention + (0.5 + 1 / 32) * int(experts))
    assert workloads.decode_bytes(model, 8, 256)[0] == int(of_layers) + head
