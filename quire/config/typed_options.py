"""Every option of an engine by its flat name and type, for editors and type checkers.

Generated from the sections of EngineConfig (`make docs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict


class EngineOptions(TypedDict, total=False):
    """What `LLM(model, ...)` takes."""

    runner: Literal["auto", "generate", "pooling"]
    """What the model is run for: answers, or vectors (embeddings, classes, scores). auto: as its files say."""
    convert: Literal["auto", "none", "embed", "classify"]
    """What a model is turned into if it was not made for it: embed pools its states, classify puts a head on
    them."""
    pooler_config: dict[str, Any]
    """JSON object, for pooling unlike the model's files say: pooling_type (CLS, LAST, MEAN, MAX), use_activation;
    step_tag_id and returned_token_ids, for rewards of steps."""
    model_impl: Literal["auto", "quire", "vllm", "transformers"]
    """Whose code the model is: quire's families, or transformers' own, slower. auto: quire's if there is one. vllm:
    as quire, for scripts that say so."""
    trust_remote_code: bool
    """Run Python code that comes with a checkpoint, in the worker, if neither Quire nor transformers has its
    class."""
    tokenizer: str | None
    """Folder or id of the tokenizer, if it is not the model's own."""
    tokenizer_mode: Literal["auto", "hf", "slow", "mistral"]
    """What the tokenizer is made of. auto: tokenizer.json, or whatever vocabulary there is; hf: no file of
    Mistral's own form; slow: the vocabulary that tokenizer.json was made of, anew; mistral: tekken.json or
    tokenizer.model.v3."""
    tokenizer_revision: str | None
    """Branch, tag or commit of the `tokenizer`; that of the model if not given."""
    skip_tokenizer_init: bool
    """Work on token ids only; text prompts and stop strings are then refused."""
    revision: str | None
    """Branch, tag or commit on the hub."""
    hf_token: str | None
    """Hub token for gated models; the HF_TOKEN variable works too."""
    download_dir: str | None
    """Where downloads are kept (the hub's own cache if not given)."""
    dtype: Literal["auto", "bfloat16", "float16", "float32", "half", "float", "bf16", "fp16", "fp32"]
    """Number type of weights and activations. auto: the checkpoint's; float32 checkpoints run in bfloat16 on a
    GPU."""
    quantization: str | None
    """How weights are kept in fewer bits. fp8: 8-bit floats, made while a plain checkpoint loads. None: as they
    are."""
    seed: int
    """Seed of everything drawn at random for requests without a seed of their own and for dummy weights."""
    max_model_len: int | None
    """Context length in tokens. None: the model's own, lowered (and said so) if the KV cache cannot hold it."""
    max_logprobs: int
    """Most log-probabilities a request may ask for at each position."""
    logits_processors: Sequence[str | type]
    """Logits processors of your own: classes as package.module:Class, or names that installed packages gave
    them."""
    enable_prompt_embeds: bool
    """Take prompts as embeddings (`prompt_embeds`): numbers that no tokenizer has seen, straight into the model."""
    served_model_name: list[str]
    """Names the API answers to; the first is used in replies. None given: the `model` value."""
    chat_template: str | None
    """Jinja chat template, or a file that holds one, instead of the model's own."""
    generation_config: str
    """Where sampling defaults come from: auto (the model's generation_config.json), none, or a folder."""
    hf_overrides: dict[str, Any]
    """JSON object laid over the model's config.json."""
    config_format: Literal["auto", "hf", "mistral"]
    """Whether config.json (hf) or params.json (mistral) says what the model is. auto: config.json if there is
    one."""
    load_format: Literal["auto", "safetensors", "pt", "mistral", "dummy"]
    """Which files hold the weights. auto: safetensors, by the names that config_format goes with; pt: .bin and .pt
    files, read without running what is in them; mistral: consolidated.safetensors; dummy: none, random numbers of
    the right shapes, for measuring without a checkpoint."""
    use_tqdm_on_load: bool
    """Show progress while weights load."""
    block_size: int
    """Tokens a KV block."""
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
    """Type of keys and values in the cache. auto: the model's; fp8 (e4m3): half the memory and half the reads."""
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"]
    """Type of the states of scans (Mamba, delta rules), which every step reads and writes. auto: float32, as
    transformers keeps them; bfloat16: half the memory, half the reads and writes, and less exact."""
    gpu_memory_utilization: float
    """Share of the memory that is free at start which this engine may take (weights, activations and KV cache)."""
    kv_cache_memory_bytes: int | None
    """Exact size of the KV cache; overrides the share."""
    num_gpu_blocks_override: int | None
    """Exact number of KV blocks, for tests."""
    enable_prefix_caching: bool | None
    """Reuse the KV blocks of equal prompt beginnings. None: yes, but not for models whose layers keep a state."""
    cpu_kv_cache_memory_bytes: int | None
    """Size of the KV cache on a CPU. None: what all seats could fill, at most a quarter of the free memory."""
    max_num_seqs: int | None
    """Most requests in one step (seats). None: 1024 on a GPU with 70 GiB or more, else 256; 64 on a CPU."""
    max_num_batched_tokens: int | None
    """Most tokens in one step. None: 16384 on a GPU with 70 GiB or more, 32768 of a mixture of experts with 120
    GiB, there up to twice as many where ranks share a step (tensor_parallel_size) and its rows then have no more
    than 2^27 numbers, but 8192 to serve; else, and in stages (pipeline_parallel_size), 4096; 2048 on a CPU; as many
    times as there are copies (prefill_context_parallel_size)."""
    max_prefill_chunk: int
    """Most prompt tokens one request may bring to one step; 0: no limit but the token budget."""
    scheduling_policy: Literal["fcfs", "priority"]
    """Order of waiting requests; priority: lower value first, then arrival."""
    max_num_queued_reqs: int | None
    """Most waiting requests; one more is refused (HTTP 503). None: no limit offline, 4096 under `quire serve`."""
    max_queue_seconds: float | None
    """Longest wait, as predicted, with which a request is still taken; one that would wait longer is refused (HTTP
    503, with the time to come again). While an overload lasts the queue is kept shorter. 0: no limit. None: no
    limit offline, 30 under `quire serve`."""
    async_scheduling: bool | None
    """Plan the next step while the device runs this one (two plans in flight). None: on, except on a CPU in-
    process."""
    stream_interval: int
    """Tokens a streamed chunk."""
    speculative_config: dict[str, Any]
    """JSON object; tokens are drafted ahead and verified several a step, where that pays. method: ngram;
    num_speculative_tokens: most drafts a step; prompt_lookup_max, prompt_lookup_min: tokens that are looked for in
    the request's own text (5); policy: auto, or always. Answers are the same with and without."""
    preempt_every_step: bool
    """Test mode: preempt one running request at every step."""
    enable_lora: bool
    """Take LoRA adapters; see docs/lora.md."""
    max_loras: int
    """Adapters on the device, and so in one batch: requests for others wait for a place."""
    max_lora_rank: int
    """Largest rank of an adapter. Each of max_loras places takes memory for it, in every layer."""
    max_cpu_loras: int | None
    """Adapters kept in the host's memory, those on the device among them; others are read again when they are asked
    for. None: max_loras."""
    lora_dtype: Literal["auto", "float16", "bfloat16", "float32"]
    """Type of the adapters' numbers. auto: the model's."""
    lora_target_modules: list[str]
    """Names, or ends of names, of the modules that adapters may change (q_proj, lm_head, experts); others take no
    memory, and adapters that change them are refused. None given: all."""
    fully_sharded_loras: bool
    """Refused: of each matrix an adapter's factors are shared among ranks as the matrix itself is, by rows or
    columns."""
    tool_call_parser: str
    """Format of the model's tool calls by name; auto: found in its chat template; none: answers hold no calls."""
    reasoning_parser: str
    """Format of the model's reasoning by name; auto: found in its chat template; none: all is content."""
    tool_parser_plugin: str | None
    """Python file that registers further tool formats (`TOOL_FORMATS.register`)."""
    reasoning_parser_plugin: str | None
    """Python file that registers further reasoning formats (`REASONING_FORMATS.register`)."""
    structured_outputs_config: dict[str, Any]
    """JSON object; backend: what enforces structured outputs unless a request says, auto, llguidance, xgrammar, or
    what an installed package adds."""
    default_chat_template_kwargs: dict[str, Any]
    """JSON object of chat template variables; those of a request come first."""
    device: str
    """Where the model runs: cuda, cpu, or torch:TYPE, any device of torch, without kernels of ours (torch:mps,
    torch:xpu, torch:cuda for AMD's GPUs); auto: an NVIDIA GPU, else another accelerator, else the CPU."""
    tensor_parallel_size: int
    """Ranks that share every layer of the model: as many GPUs, or processes on a CPU."""
    pipeline_parallel_size: int
    """Stages, one behind the other, that the model's layers are dealt to: each is tensor_parallel_size ranks."""
    pipeline_parallel_layers: list[int]
    """Layers of each stage. None given: so that all have as much to do, logits counted among the last one's."""
    prefill_context_parallel_size: int
    """Copies of the model, each tensor_parallel_size ranks, that share long prompts: each computes a part of a
    step's tokens and keeps the KV of all."""
    enable_expert_parallel: bool
    """Ranks share the experts of a mixture one by one, each holding whole ones, instead of a part of every
    expert."""
    enable_eplb: bool
    """Move experts between ranks, so that each has as much to do; needs enable_expert_parallel."""
    eplb_config: dict[str, Any]
    """JSON object. step_interval: steps between two moves, 3000; num_redundant_experts: copies of those of a
    layer's experts that have the most to do, on further ranks, 0."""
    data_parallel_size: int
    """Engine cores behind one server, each with a copy of the model on devices of its own (tensor_parallel_size of
    them) and its share of the requests."""
    distributed_executor_backend: str
    """uni: the worker shares the engine's process; mp: a process of its own, one a rank; ray: an actor of a Ray
    cluster a rank; external: ranks that somebody else starts, on any machine, with `quire worker`; or what an
    installed package adds. auto: uni for one rank, mp for more."""
    attention_backend: str
    """Attention implementation by name: triton, triton_mla, torch_cpu, sdpa, flashinfer, flash_attn; auto: the
    first in the platform's order that supports the model."""
    enforce_eager: bool
    """Launch every kernel from Python instead of replaying captured CUDA graphs."""
    cuda_graph_sizes: list[int]
    """Batch sizes to capture. None given: 1, 2, 4, 8 and on in growing steps up to max_num_seqs (at most 512)."""
    num_threads: int | None
    """CPU threads of the worker; None: the physical cores this process may use, one for a very small model."""
    max_engine_restarts: int
    """An engine that dies in a process of its own is started again, and its requests go on; but not after so many
    times in a row in which nobody got a token. 0: never."""
    debug: bool
    """Check the scheduler's seats and blocks after every step (slow)."""
    disable_log_stats: bool
    """No periodic statistics line."""
    stat_loggers: Sequence[str | type]
    """Who is told the engine's statistics besides: classes of your own as package.module:Class, or names that
    installed packages gave them."""
    kv_cache_metrics: bool
    """Measure how long KV blocks live, and lie idle before somebody needs the room."""
    kv_cache_metrics_sample: float
    """Share of the blocks that are measured, 0 … 1."""
    enable_mfu_metrics: bool
    """Count the operations and bytes that steps ask of the device, as estimated from the model's shape, and the
    least time that these would take."""
    enable_log_requests: bool
    """Log every request (ids and lengths, never text)."""
    log_level: Literal["debug", "info", "warning", "error"]
    """How much is logged."""
    flight_record_dir: str | None
    """Folder for the record of its last steps that an engine leaves when it dies, and that SIGUSR1 asks of a
    server. None: quire/records in the user's cache folder."""
    profiler_config: dict[str, Any]
    """JSON object; lets profiles be recorded. profiler: torch or cuda; torch_profiler_dir: folder for the
    traces."""


@dataclass(kw_only=True)
class OptionFields:
    """The same with defaults, and the model."""

    model: str = ""
    runner: Literal["auto", "generate", "pooling"] = "auto"
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    pooler_config: dict[str, Any] = field(default_factory=dict)
    model_impl: Literal["auto", "quire", "vllm", "transformers"] = "auto"
    trust_remote_code: bool = False
    tokenizer: str | None = None
    tokenizer_mode: Literal["auto", "hf", "slow", "mistral"] = "auto"
    tokenizer_revision: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    hf_token: str | None = None
    download_dir: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32", "half", "float", "bf16", "fp16", "fp32"] = "auto"
    quantization: str | None = None
    seed: int = 0
    max_model_len: int | None = None
    max_logprobs: int = 20
    logits_processors: Sequence[str | type] = field(default_factory=list)
    enable_prompt_embeds: bool = False
    served_model_name: list[str] = field(default_factory=list)
    chat_template: str | None = None
    generation_config: str = "auto"
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    config_format: Literal["auto", "hf", "mistral"] = "auto"
    load_format: Literal["auto", "safetensors", "pt", "mistral", "dummy"] = "auto"
    use_tqdm_on_load: bool = True
    block_size: int = 16
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool | None = None
    cpu_kv_cache_memory_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_prefill_chunk: int = 0
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_num_queued_reqs: int | None = None
    max_queue_seconds: float | None = None
    async_scheduling: bool | None = None
    stream_interval: int = 1
    speculative_config: dict[str, Any] = field(default_factory=dict)
    preempt_every_step: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    lora_target_modules: list[str] = field(default_factory=list)
    fully_sharded_loras: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    tool_parser_plugin: str | None = None
    reasoning_parser_plugin: str | None = None
    structured_outputs_config: dict[str, Any] = field(default_factory=dict)
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    device: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_parallel_layers: list[int] = field(default_factory=list)
    prefill_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    eplb_config: dict[str, Any] = field(default_factory=dict)
    data_parallel_size: int = 1
    distributed_executor_backend: str = "auto"
    attention_backend: str = "auto"
    enforce_eager: bool = False
    cuda_graph_sizes: list[int] = field(default_factory=list)
    num_threads: int | None = None
    max_engine_restarts: int = 5
    debug: bool = False
    disable_log_stats: bool = False
    stat_loggers: Sequence[str | type] = field(default_factory=list)
    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = 0.01
    enable_mfu_metrics: bool = False
    enable_log_requests: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    flight_record_dir: str | None = None
    profiler_config: dict[str, Any] = field(default_factory=dict)
