"""Attention backends by name. What is not ours imports its library only once it is chosen."""

from __future__ import annotations

from quire.foundation.errors import ConfigError
from quire.foundation.registry import Registry

ATTENTION_BACKENDS = Registry(
    "attention backend",
    {
        "triton": "quire.attention.triton:TritonAttention",
        "triton_mla": "quire.attention.triton_mla:TritonLatentAttention",
        "torch_cpu": "quire.attention.torch_cpu:TorchCPUAttention",
        "sdpa": "quire.attention.sdpa:SDPAttention",
        "flashinfer": "quire.attention.flashinfer:FlashInferAttention",
        "flash_attn": "quire.attention.flash_attn:FlashAttention",
    },
    contract="quire.attention.base:AttentionBackend",
    needs=("refuses", "plan", "run"),
    is_class=True,
)
PROMPT_ATTENTION_BACKENDS = Registry(  # of encoders
    "prompt attention backend",
    {
        "triton": "quire.attention.prompt_triton:TritonPromptAttention",
        "sdpa": "quire.attention.prompt_torch:TorchPromptAttention",
    },
    contract="quire.attention.base:PromptAttention",
    needs=("refuses", "plan", "run"),
    is_class=True,
)


def check_attention_backend(name: str) -> None:
    """Raises ConfigError naming the known ones if it is none of them."""
    if name == "auto" or name in PROMPT_ATTENTION_BACKENDS:
        return
    if name not in ATTENTION_BACKENDS:
        known = dict.fromkeys(["auto", *ATTENTION_BACKENDS, *PROMPT_ATTENTION_BACKENDS])
        raise ConfigError(f"attention_backend={name!r} is unknown; there are: {', '.join(known)}", "attention_backend")
