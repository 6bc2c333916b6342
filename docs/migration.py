"""Tables for those who come from another engine: flag by flag, checked against the options that there are."""

from __future__ import annotations

import dataclasses
import itertools
import re

from quire.config.engine import SECTIONS
from quire.config.serve import ServeConfig
from quire.config.sglang import TABLE
from quire.config.unsupported import UNSUPPORTED

# Options of vLLM's server by name: each is one of ours, or refused.
VLLM = """
additional_config aggregate_engine_logging all2all_backend allow_credentials allow_deprecated_quantization
allowed_headers allowed_local_media_path allowed_media_domains allowed_methods allowed_origins api_key
api_server_count async_scheduling attention_backend attention_config block_size calculate_kv_scales chat_template
chat_template_content_format code_revision collect_detailed_traces compilation_config config_format convert
cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params
cudagraph_capture_sizes cudagraph_metrics data_parallel_address data_parallel_backend data_parallel_external_lb
data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port
data_parallel_size data_parallel_size_local data_parallel_start_rank data_parallel_supervisor_port
dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size
decode_context_parallel_size default_chat_template_kwargs default_mm_loras device_ids diffusion_config
disable_access_log_for_endpoints disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce
disable_fastapi_docs disable_hybrid_kv_cache_manager disable_log_stats disable_nccl_for_dp_synchronization
disable_sliding_window disable_uvicorn_access_log distributed_executor_backend distributed_timeout_seconds
download_dir dp_supervisor_probe_interval_s dtype ec_transfer_config enable_auto_tool_choice
enable_bf16x3_router_gemm enable_chunked_prefill enable_cumem_allocator enable_dbo enable_elastic_ep
enable_ep_weight_filter enable_eplb enable_expert_parallel enable_flash_late_interaction enable_flashinfer_autotune
enable_force_include_usage enable_layerwise_nvtx_tracing enable_log_deltas enable_log_outputs enable_log_requests
enable_logging_iteration_details enable_lora enable_mamba_cache_stochastic_rounding enable_mfu_metrics
enable_mixed_moe_lora_format enable_mm_embeds enable_moe_shared_loras enable_offline_docs enable_per_request_metrics
enable_prefix_caching enable_prompt_embeds enable_prompt_tokens_details enable_request_id_headers
enable_return_routed_experts enable_server_load_tracking enable_sleep_mode enable_ssl_refresh
enable_tokenizer_info_endpoint enable_tower_connector_lora enforce_eager eplb_config
exclude_tools_when_tool_choice_none expert_placement_strategy fail_on_environ_validation fingerprint_mode
fingerprint_value fully_sharded_loras gdn_prefill_backend generation_config gpu_memory_utilization grpc
h11_max_header_count h11_max_incomplete_event_size headless hf_config_path hf_overrides hf_token host
ignore_patterns interleave_mm_strings io_processor_plugin ir_op_priority jit_monitor_mode jit_monitor_verbose
kernel_config kv_cache_dtype kv_cache_dtype_skip_layers kv_cache_memory_bytes kv_cache_metrics
kv_cache_metrics_sample kv_events_config kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill
kv_transfer_config language_model_only limit_mm_per_prompt linear_backend load_format log_config_file
log_error_stack logits_processors logprobs_mode long_prefill_token_threshold lora_dtype lora_modules
lora_target_modules mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds
mamba_ssm_cache_dtype master_addr master_port max_cpu_loras max_cudagraph_capture_size max_log_len max_logprobs
max_long_partial_prefills max_lora_rank max_loras max_model_len max_num_batched_tokens max_num_partial_prefills
max_num_scheduled_tokens max_num_seqs max_parallel_loading_workers media_io_kwargs middleware
mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_ipc_gpu_memory_gb mm_processor_cache_gb
mm_processor_cache_type mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc model
model_class_overrides model_impl model_loader_extra_config moe_backend nnodes node_rank num_gpu_blocks_override
numa_bind numa_bind_cpus numa_bind_nodes offload_backend offload_group_size offload_num_in_group offload_params
offload_prefetch_step optimization_level otlp_traces_endpoint override_attention_dtype override_generation_config
performance_mode pipeline_parallel_size pooler_config port prefill_context_parallel_size prefill_schedule_interval
prefix_caching_hash_algo prefix_match_unit profiler_config pt_load_map_location quantization quantization_config
ray_workers_use_nsight reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers response_role
return_tokens_as_token_ids revision root_path runner safetensors_load_strategy safetensors_prefetch_block_size
safetensors_prefetch_num_threads scheduler_cls scheduler_reserve_full_isl scheduling_policy seed served_model_name
show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling skip_tokenizer_init spec_method spec_model
spec_tokens specialize_active_lora speculative_config ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers
ssl_keyfile stream_interval structured_outputs_config tensor_parallel_size tokenizer tokenizer_mode
tokenizer_revision tokens_only tool_call_parser tool_parser_plugin tool_server trust_remote_code
trust_request_chat_template ubatch_size uds use_fp64_gumbel use_tqdm_on_load uvicorn_log_level video_pruning_rate
watermark weight_transfer_config worker_cls worker_extension_cls
"""

VLLM_HEAD = """# From vLLM

Scripts go over by replacing the name: `quire serve` for `vllm serve`, `from quire import LLM, SamplingParams` for `from vllm import …`.
Routes, fields of requests, metrics (`vllm:*`) and classes have the names that you know, and options too: what is there under the
same name means the same; what is not is refused by name, so that nothing is ignored unseen.

| | vLLM | Quire |
|---|---|---|
| address | all interfaces | 127.0.0.1 unless `--host 0.0.0.0` |
| `--api-key` | protects `/v1` | protects every route but the health probes |
| `--gpu-memory-utilization` | a share of all memory | a share of what is free at start |
| context that does not fit | refused | lowered, and the log says so, unless `--max-model-len` is given |
| tool and reasoning parsers | flags | found by the chat template; the flags overrule |
| an engine that dies | requests fail | another takes its place, and streams go on ([faults](faults.md)) |
| torch.compile, CUDA graphs | `--compilation-config` | nothing is compiled; graphs by themselves, `--enforce-eager` for none |
| methods of `LLM`, `LLMEngine` and `AsyncLLM` | | the same names; of those that are none here (`sleep`, `update_weights`, …) the error says what to use |
| overload | queues without end | refused with `Retry-After` by predicted wait (`--max-queue-seconds`) |

Generated from the options (`make docs`).
"""
SGLANG_HEAD = """# From SGLang

`quire serve MODEL` for `python -m sglang.launch_server --model-path MODEL`. Clients of `/v1/chat/completions`, `/v1/completions`,
`/v1/embeddings`, `/v1/rerank`, `/v1/responses` and `/v1/messages` change their base URL only: the port is 8000 here, not 30000. `/generate` of
SGLang is not there: `/v1/completions` takes text or token ids. The prefix cache is on, as RadixAttention is (of models that
keep a state with `--enable-prefix-caching` alone); overlap, chunked prefill mixed with decodes and CUDA graphs need no flag.
"""


def options() -> dict[str, str]:
    """Name of each option → the title of its section."""
    sections = {**SECTIONS, "serve": ServeConfig}
    return {field.name: name for name, cls in sections.items() for field in dataclasses.fields(cls)}


def flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def render_vllm() -> str:
    known = options()
    theirs = VLLM.split()
    if wrong := [name for name in theirs if name not in known and name not in UNSUPPORTED]:
        raise SystemExit(f"docs/migration.py: {wrong} are neither options nor refused")
    same = [name for name in theirs if name in known]
    own = sorted(known.keys() - same)
    lines = [VLLM_HEAD, "\n## The same\n", ", ".join(map(flag, same)) + ".\n"]
    lines += ["\n## Refused, and what is instead\n", "| why | options |", "|---|---|"]
    by_reason = itertools.groupby(sorted(UNSUPPORTED, key=lambda name: UNSUPPORTED[name]), key=UNSUPPORTED.__getitem__)
    lines += [f"| {reason} | {', '.join(flag(name) for name in sorted(names))} |" for reason, names in by_reason]
    lines += ["\n## Quire's own\n", ", ".join(map(flag, own)) + ": [the reference](reference.md).\n"]
    return "\n".join(lines)


def render_sglang() -> str:
    known = options()
    lines = [SGLANG_HEAD, "| SGLang | Quire |", "|---|---|"]
    for line in TABLE.strip().splitlines():
        theirs, ours = line.split(" | ", 1)
        for name in re.findall(r"--([a-z-]+)", ours):
            if name.removeprefix("no-").replace("-", "_") not in known:
                raise SystemExit(f"docs/migration.py: there is no --{name}")
        told = re.sub(
            r"(--[a-z-]+(?: \{.*\}| priority| pooling| external)?|MODEL|CUDA_VISIBLE_DEVICES|/metrics)", r"`\1`", ours
        )
        lines.append(f"| {', '.join(f'`{one}`' for one in theirs.split(', '))} | {told} |")
    return "\n".join(lines) + "\n"
