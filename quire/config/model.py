"""What to run: the model, its tokenizer, its numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quire.config.options import Options, OrAll, Positive

DType = Literal["auto", "bfloat16", "float16", "float32", "half", "float", "bf16", "fp16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Options):
    model: str = ""
    """Local folder or Hugging Face id. Empty: the demo model that ships with Quire."""
    runner: Literal["auto", "generate", "pooling"] = "auto"
    """What the model is run for: answers, or vectors (embeddings, classes, scores). auto: as its files say."""
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    """What a model is turned into if it was not made for it: embed pools its states, classify puts a head on them."""
    pooler_config: dict[str, Any] = field(default_factory=dict)
    """JSON object, for pooling unlike the model's files say: pooling_type (CLS, LAST, MEAN, MAX), use_activation;
    step_tag_id and returned_token_ids, for rewards of steps."""
    model_impl: Literal["auto", "quire", "vllm", "transformers"] = "auto"
    """Whose code the model is: quire's families, or transformers' own, slower. auto: quire's if there is one. vllm: as
    quire, for scripts that say so."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint, in the worker, if neither Quire nor transformers has its class."""
    tokenizer: str | None = None
    """Folder or id of the tokenizer, if it is not the model's own."""
    tokenizer_mode: Literal["auto", "hf", "slow", "mistral"] = "auto"
    """What the tokenizer is made of. auto: tokenizer.json, or whatever vocabulary there is; hf: no file of Mistral's
    own form; slow: the vocabulary that tokenizer.json was made of, anew; mistral: tekken.json or tokenizer.model.v3."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of the `tokenizer`; that of the model if not given."""
    skip_tokenizer_init: bool = False
    """Work on token ids only; text prompts and stop strings are then refused."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    hf_token: str | None = None
    """Hub token for gated models; the HF_TOKEN variable works too."""
    download_dir: str | None = None
    """Where downloads are kept (the hub's own cache if not given)."""
    dtype: DType = "auto"
    """Number type of weights and activations. auto: the checkpoint's; float32 checkpoints run in bfloat16 on a GPU."""
    quantization: str | None = None
    """How weights are kept in fewer bits. fp8: 8-bit floats, made while a plain checkpoint loads. None: as they are."""
    seed: int = 0
    """Seed of everything drawn at random for requests without a seed of their own and for dummy weights."""
    max_model_len: Positive | None = None
    """Context length in tokens. None: the model's own, lowered (and said so) if the KV cache cannot hold it."""
    max_logprobs: OrAll = 20
    """Most log-probabilities a request may ask for at each position."""
    logits_processors: list[str] = field(default_factory=list)
    """Logits processors of your own: classes as package.module:Class, or names that installed packages gave them."""
    enable_prompt_embeds: bool = False
    """Take prompts as embeddings (`prompt_embeds`): numbers that no tokenizer has seen, straight into the model."""
    served_model_name: list[str] = field(default_factory=list)
    """Names the API answers to; the first is used in replies. None given: the `model` value."""
    chat_template: str | None = None
    """Jinja chat template, or a file that holds one, instead of the model's own."""
    generation_config: str = "auto"
    """Where sampling defaults come from: auto (the model's generation_config.json), none, or a folder."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """JSON object laid over the model's config.json."""
    config_format: Literal["auto", "hf", "mistral"] = "auto"
    """Whether config.json (hf) or params.json (mistral) says what the model is. auto: config.json if there is one."""
    load_format: Literal["auto", "safetensors", "pt", "mistral", "dummy"] = "auto"
    """Which files hold the weights. auto: safetensors, by the names that config_format goes with; pt: .bin and .pt
    files, read without running what is in them; mistral: consolidated.safetensors; dummy: none, random numbers of the
    right shapes, for measuring without a checkpoint."""
    use_tqdm_on_load: bool = True
    """Show progress while weights load."""

    @property
    def form(self) -> str:
        """`config_format`, which follows from a `load_format` of Mistral's."""
        return "mistral" if self.load_format == "mistral" and self.config_format == "auto" else self.config_format

    @property
    def names(self) -> list[str]:
        """What the model is called in replies and metrics; the first counts."""
        return self.served_model_name or [self.model or "quire-demo"]
