"""The only place where "auto" becomes a value. Each choice is noted with its reason."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from quire.config.attention import check_attention_backend
from quire.config.devices import resolve_device, runs_on_cpu
from quire.config.engine import EngineConfig
from quire.config.files.tokenizer_files import tokenizer_folder
from quire.config.gguf.folder import gguf_folder, gguf_in, split_name
from quire.config.hardware import Hardware
from quire.config.logits_processors import processor_classes
from quire.config.model import ModelConfig
from quire.config.model_info import DTYPE_ALIASES, ModelInfo, check_architecture, read_model_info
from quire.config.parallel.contexts import check_contexts, check_steps
from quire.config.parallel.data_parallel import check_cores, gpus_for
from quire.config.parallel.ranks import check_ranks, check_stages, expert_keys
from quire.config.peft import CONFIG as ADAPTER
from quire.config.peft import WEIGHTS as ADAPTER_WEIGHTS
from quire.config.pooler import PoolerConfig, resolve_pooler
from quire.config.quantization import check_quantization, resolve_quantization
from quire.config.runtime import RuntimeConfig
from quire.config.speculative import SpeculativeConfig
from quire.config.transformers_models import TRANSFORMERS
from quire.foundation.errors import ConfigError

DEMO_MODEL = Path(__file__).parent.parent / "demo_model"
BIG_GPU_BYTES, LARGE_GPU_BYTES = 70 * 1024**3, 120 * 1024**3
MOST_NUMBERS = 1 << 27  # of the residual stream, of a step that is larger because ranks share it
STAGES_TOKENS = 4096  # of a step: a stage computes a chunk of a prompt while the next one has the chunk before
Part = Literal["all", "tokenizer", "config"]
_DRAFTS = "or leave speculative_config out; ranks of tensor_parallel_size may draft"
# What of a repository is downloaded, by load_format.
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_PAGE = re.compile(r"(?:(?:https?://)?(?:huggingface\.co|hf\.co)/)?([\w.-]+/[\w.-]+)(?:/tree/.*|/*)")
"""A model's address, as browsers show it, and its id."""
_WEIGHTS = {
    "auto": ("*.safetensors",),
    "safetensors": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.bin", "*.pt", "*.pth"),
}


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The user's options with every "auto" decided. Only the size of the KV cache is open: the worker measures it."""

    config: EngineConfig
    info: ModelInfo
    device: str  # cuda | cpu | torch:TYPE | whatever a platform that was installed is called
    dtype: str  # bfloat16 | float16 | float32
    kv_dtype: str  # the same, or float8_e4m3fn | float8_e5m2
    max_model_len: int  # wanted; the worker may lower it if it was not asked for
    max_model_len_is_explicit: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int  # plans in flight
    executor: str  # a name in EXECUTORS
    pooler: PoolerConfig | None = None  # None: the model generates
    speculative: SpeculativeConfig | None = None  # None: nothing is drafted
    quantization: str | None = None  # name of the method; None: weights are plain
    notes: tuple[str, ...] = ()


def resolve(config: EngineConfig, *, serving: bool = False, hardware: Hardware | None = None) -> Resolved:
    """Decide everything that can be decided without loading the model. hardware: that it is to run on; None: this.

    Raises ConfigError naming the option that cannot work.
    """
    notes: list[str] = []
    _check(config)
    if config.model.quantization is not None:
        check_quantization(config.model.quantization)
    given = config.model
    info = read_model_info(
        locate_model(given), given.hf_overrides, given.generation_config, given.model_impl, given.form,
        trusted=given.trust_remote_code,
    )  # fmt: skip
    method = resolve_quantization(config.model.quantization, info.quantization)
    if info.is_mistral and given.load_format == "pt":
        raise ConfigError("load_format=pt reads Hugging Face's files, and params.json is Mistral's form", "load_format")
    notes += _said_of(info)
    device = _device(config, notes) if hardware is None else hardware.device
    gpus = gpus_for(config.runtime, hardware)
    check_ranks(config.runtime, info, device, gpus)
    check_cores(config.runtime, device, gpus)
    pooler = resolve_pooler(config.model, info)
    check_stages(config.runtime, info, pools=pooler is not None)
    check_contexts(config.runtime, info, pools=pooler is not None)
    if pooler is None:
        _check_generates(info)
    if info.impl == TRANSFORMERS:
        _check_fallback(config, info, pools=pooler is not None)
    _check_processors(config, pools=pooler is not None)
    notes += _left_to_users(pooler)
    dtype = _dtype(config.model.dtype, info.dtype, device, pooler is not None, notes)
    seqs, tokens = _step_sizes(config, info, device, hardware, serving=serving)
    check_steps(config.runtime, tokens, config.schedule.max_prefill_chunk, on_cpu=runs_on_cpu(device))
    speculative = _speculative(config, tokens, pools=pooler is not None)
    executor = _executor(config.runtime, apart=info.runs_code)
    overlap, stages = config.schedule.async_scheduling, config.runtime.pipeline_parallel_size
    if overlap is None:
        overlap = device == "cuda" or executor != "uni"
    return Resolved(
        config=config,
        info=info,
        device=device,
        dtype=dtype,
        kv_dtype=_kv_dtype(config.cache.kv_cache_dtype, dtype, device),
        max_model_len=_context(config.model, info, pooler, notes),
        max_model_len_is_explicit=config.model.max_model_len is not None,
        max_num_seqs=min(seqs, tokens),
        max_num_batched_tokens=tokens,
        depth=stages + 1 if stages > 1 else 2 if overlap else 1,
        executor=executor,
        pooler=pooler,
        speculative=speculative,
        quantization=method,
        notes=tuple(notes),
    )


def _step_sizes(
    config: EngineConfig, info: ModelInfo, device: str, hardware: Hardware | None, *, serving: bool
) -> tuple[int, int]:
    """Requests that run at a time, and tokens of a step: as asked for, or by the device's memory."""
    memory = 0 if device != "cuda" else _gpu_bytes() if hardware is None else hardware.total
    copies, big = config.runtime.prefill_context_parallel_size, memory >= BIG_GPU_BYTES
    usual = 2048 if runs_on_cpu(device) else (8192 if serving else 16384) if big else 4096
    if memory >= LARGE_GPU_BYTES and not serving and copies == 1:
        if expert_keys(info):
            usual = 32768  # the more tokens, the fewer of an expert's tiles are half empty
        if config.runtime.tensor_parallel_size > 1:  # the more, the more of the ranks' sums are under way
            usual = max(usual, min(2 * usual, MOST_NUMBERS // (info.hidden_size or 8192) // 1024 * 1024))
    if config.runtime.pipeline_parallel_size > 1:
        usual = min(usual, STAGES_TOKENS)
    seqs = config.schedule.max_num_seqs or (64 if runs_on_cpu(device) else 1024 if big else 256)
    return seqs, config.schedule.max_num_batched_tokens or copies * usual


def _check_processors(config: EngineConfig, *, pools: bool) -> None:
    if config.model.logits_processors:
        if pools:
            raise ConfigError("logits_processors are for models that generate, and this one pools", "logits_processors")
        processor_classes(config.model.logits_processors)


def _said_of(info: ModelInfo) -> Iterator[str]:
    """What the user should know of the model's settings."""
    if info.wrapper:
        yield f"{info.wrapper}: its text part runs ({info.architecture}); there are no images"
    if (Path(info.path) / ADAPTER).exists():
        yield f"{ADAPTER} is in the folder too, and does nothing unless the adapter is asked for (enable_lora)"
    if info.unknown_keys:
        yield f"config.json has keys that mean nothing to {info.architecture}: {', '.join(info.unknown_keys)}"


def _left_to_users(pooler: PoolerConfig | None) -> list[str]:
    """What sentence-transformers does with texts, and nobody here."""
    if pooler is None or not (words := dict(pooler.prompts).get(pooler.default_prompt)):
        return []
    return [
        f"texts are taken as they are given: sentence-transformers would begin each with {words!r} "
        f"(default_prompt_name={pooler.default_prompt})"
    ]


def _check_fallback(config: EngineConfig, info: ModelInfo, *, pools: bool) -> None:
    """What models that run through transformers do not do."""
    if pools:
        raise ConfigError(f"{info.architecture} runs through transformers, where models do not pool", "runner")
    if info.quantization:
        raise ConfigError(
            f"{info.architecture} runs through transformers, where quantized checkpoints are not read", "model"
        )
    if config.lora.enable_lora:
        raise ConfigError(f"{info.architecture} runs through transformers, where there are no adapters", "enable_lora")
    if config.model.quantization is not None:
        raise ConfigError(
            f"quantization={config.model.quantization}: {info.architecture} runs through transformers, where "
            "weights stay as they are",
            "quantization",
        )


def _context(model: ModelConfig, info: ModelInfo, pooler: PoolerConfig | None, notes: list[str]) -> int:
    longest = model.max_model_len or min(info.max_position, info.usual_context or info.max_position)
    if longest < info.max_position and not model.max_model_len:
        notes.append(
            f"max_model_len={longest}: the first chunk of dual chunk attention, for which there are kernels; up to "
            f"--max-model-len {info.max_position} plain torch attends, far slower"
        )
    if pooler is not None and pooler.max_tokens and not model.max_model_len and pooler.max_tokens < longest:
        longest = pooler.max_tokens
        notes.append(
            f"max_model_len={longest}: the vectors were made for that; there are {info.max_position} positions"
        )
    if longest > info.max_position:
        raise ConfigError(
            f"max_model_len={longest} is more than the model's {info.max_position} positions", "max_model_len"
        )
    return longest


def _check_generates(info: ModelInfo) -> None:
    if info.sees_both_ways:
        raise ConfigError(
            f"{info.architecture} attends both ways (is_causal or use_bidirectional_attention of config.json), which "
            "is not supported for generating: start it with runner=pooling, or with "
            'hf_overrides={"is_causal": null} as if it did not',
            "model",
        )


def _speculative(config: EngineConfig, max_tokens: int, *, pools: bool) -> SpeculativeConfig | None:
    """max_tokens: of a step."""
    wanted, runtime = SpeculativeConfig.read(config.schedule.speculative_config), config.runtime
    if wanted is None:
        return None
    why = ""
    if pools:
        why = " is for models that generate, and this one pools"
    elif runtime.pipeline_parallel_size > 1:
        why = f": stages do not draft; set pipeline_parallel_size=1 (got {runtime.pipeline_parallel_size}), {_DRAFTS}"
    elif (copies := runtime.prefill_context_parallel_size) > 1:
        why = f": copies that share prompts do not draft; set prefill_context_parallel_size=1 (got {copies}), {_DRAFTS}"
    elif max_tokens <= wanted.num_speculative_tokens:
        why = (
            f": a step of max_num_batched_tokens = {max_tokens} has no room for a token and "
            f"{wanted.num_speculative_tokens} drafts"
        )
    if why:
        raise ConfigError(f"speculative_config{why}", "speculative_config")
    return wanted


def locate_model(model: ModelConfig, *, wanted: Part = "all") -> Path:
    """The local folder of the model: as given, the demo model, or a download from the hub.

    wanted: which part of it. Its architecture must be known if it is to run.
    """
    if not model.model:
        return DEMO_MODEL
    path, which = Path(model.model).expanduser(), ""
    if not path.exists():
        name, which = split_name(model.model)
        path = Path(name).expanduser()
    if path.exists():
        file = None if model.load_format == "pt" and path.is_dir() else gguf_in(path, which)
        if file is None and not path.is_dir():
            raise ConfigError(
                f"model {model.model!r} is a file, and no .gguf file: name the folder that it is in", "model"
            )
        return path if file is None else gguf_folder(file)
    if model.model.endswith(".gguf"):
        raise ConfigError(f"model file {model.model!r} does not exist", "model", code="model-not-found")
    if model.model.startswith((".", "/", "~")) or model.model.count("/") > 1:
        known = None if model.model.startswith((".", "/", "~")) else _HUB_PAGE.fullmatch(model.model)
        hint = f"; is it {known[1]!r} on the hub?" if known else ""
        raise ConfigError(f"model folder {model.model!r} does not exist{hint}", "model", code="model-not-found")
    return _download_gguf(replace(model, model=name), which) if which else _download(model, wanted)


def locate_adapter(path: str, model: ModelConfig) -> Path:
    """The local folder of a LoRA adapter: as given, or if there is none of that name, owner/name on the hub.

    model: whose options of the hub count for it too. Raises ConfigError if the hub has none.
    """
    folder = Path(path).expanduser()
    if folder.exists() or not _HUB_NAME.fullmatch(path):
        return folder
    try:
        return _fetch(replace(model, model=path, revision=None), [ADAPTER, ADAPTER_WEIGHTS], [])
    except ConfigError as error:
        raise ConfigError(str(error), "lora_path", code=error.code) from None


def locate_tokenizer(resolved: Resolved) -> Path | None:
    """The local folder of the tokenizer that an engine was configured with; None with skip_tokenizer_init.

    It has a tokenizer.json, which may have been made of what the model has. Raises ConfigError if it cannot be.
    """
    model = resolved.config.model
    if model.skip_tokenizer_init:
        return None
    folder = Path(resolved.info.path)
    if model.tokenizer is not None:
        revision = model.tokenizer_revision or model.revision
        folder = locate_model(replace(model, model=model.tokenizer, revision=revision), wanted="tokenizer")
    return tokenizer_folder(folder, model.tokenizer_mode)


def _download_gguf(model: ModelConfig, which: str) -> Path:
    """The one of a repository's GGUF files that has `which` in its name, or all parts of it."""
    folder = _fetch(model, [f"*{which}*.gguf", f"*{which.upper()}*.gguf", f"*{which.lower()}*.gguf"], [])
    file = gguf_in(folder, which)
    if file is None:
        raise ConfigError(f"{model.model} has no GGUF file with {which!r} in its name", "model")
    return gguf_folder(file)


def _download(model: ModelConfig, wanted: Part) -> Path:
    patterns, ignored = ["*.json", "*.jinja", "tokenizer*", "*.model", "*.tiktoken", "*.txt"], ["original/*"]
    if wanted == "config":
        ignored += ["tokenizer*", "vocab*"]
    if wanted != "tokenizer":
        patterns += _WEIGHTS.get("mistral" if model.form == "mistral" else model.load_format, ())
    if model.trust_remote_code and wanted == "all":
        patterns.append("*.py")
    if wanted == "all":  # what cannot run is not downloaded
        folder = _fetch(model, ["config.json", "params.json", ADAPTER], ignored)
        check_architecture(folder, model.hf_overrides, model.model_impl, model.form, trusted=model.trust_remote_code)
        if model.form != "mistral" and (folder / "config.json").exists():
            ignored.append("consolidated*")  # the same weights once more
    return _fetch(model, ["*.json"] if wanted == "config" else patterns, ignored)


def _fetch(model: ModelConfig, names: list[str], ignored: list[str]) -> Path:
    """Files of a repository on the hub, by patterns. Raises ConfigError."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(
            "downloading from the hub needs `pip install huggingface-hub`", "model", code="missing-package"
        ) from None
    try:
        folder: str = snapshot_download(
            model.model,
            revision=model.revision,
            cache_dir=model.download_dir,
            token=model.hf_token,
            allow_patterns=names,
            ignore_patterns=ignored,
        )
        return Path(folder)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{model.model!r} is neither a local folder nor anything that the hub could deliver: {first_line}",
            "model",
            code="hub",
        ) from error


def _check(config: EngineConfig) -> None:
    if config.model.load_format == "mistral" and config.model.config_format == "hf":
        raise ConfigError(
            "load_format=mistral goes with params.json, and config_format=hf with config.json", "load_format"
        )
    share = config.cache.gpu_memory_utilization
    if not 0 < share <= 1:
        raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {share}", "gpu_memory_utilization")
    size = config.cache.block_size
    if size < 1 or size & (size - 1):
        raise ConfigError(f"block_size must be a power of two, got {size}", "block_size")


def _executor(runtime: RuntimeConfig, *, apart: bool) -> str:
    """apart: unless it is said otherwise, the worker has a process of its own."""
    wanted, ranks = runtime.distributed_executor_backend, runtime.num_ranks
    if wanted == "uni" and ranks > 1:
        raise ConfigError(
            f"distributed_executor_backend=uni has one worker, and {ranks} ranks need a process each: use mp",
            "distributed_executor_backend",
        )
    return ("mp" if ranks > 1 or apart else "uni") if wanted == "auto" else wanted


def _device(config: EngineConfig, notes: list[str]) -> str:
    check_attention_backend(config.runtime.attention_backend)
    return resolve_device(config.runtime.device, notes)


def _gpu_bytes() -> int:
    """Total memory of the GPU in bytes, asked of the driver's management library; 0 if it does not say."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    handle, sizes = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    index = int(visible) if visible.isdigit() else 0
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
        return 0
    failed = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(sizes))
    return 0 if failed else int(sizes[0])


def _kv_dtype(wanted: str, dtype: str, device: str) -> str:
    if wanted in ("auto", dtype):
        return dtype
    found = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(wanted)
    if found is None:
        raise ConfigError(f"kv_cache_dtype={wanted} does not go with dtype={dtype}: use auto or fp8", "kv_cache_dtype")
    if device != "cpu" and (runs_on_cpu(device) or device == "torch:mps"):
        raise ConfigError(
            f"kv_cache_dtype={wanted} needs a GPU that has 8-bit floats; on {device} use auto", "kv_cache_dtype"
        )
    return found


def _dtype(wanted: str, checkpoint: str, device: str, pools: bool, notes: list[str]) -> str:
    if wanted != "auto":
        return DTYPE_ALIASES.get(wanted, wanted)
    if checkpoint == "float32" and not runs_on_cpu(device):
        half = "float16" if pools else "bfloat16"  # a vector wants digits rather than range
        notes.append(f"dtype={half}: the checkpoint is float32, which a GPU would run at a fraction of the speed")
        return half
    return checkpoint
