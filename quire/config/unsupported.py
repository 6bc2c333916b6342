"""Options that users of other engines know and Quire does not have: each is refused by name, with what it has instead.
Those of vLLM stand here, of its older versions too, since commands are pasted from what was written long ago.

A name that becomes an option of ours leaves this list (`tests/cli` says so).
"""

from __future__ import annotations

from quire.config import sglang

_REASONS: dict[str, str] = {
    "quantization names a method, which has no settings": "quantization_config allow_deprecated_quantization",
    "models take text, and adapters are named by each request": "default_mm_loras enable_tower_connector_lora",
    "one set of graphs serves any number of adapters": "specialize_active_lora",
    "adapters of experts are read one an expert and all in one alike": """
        enable_mixed_moe_lora_format enable_moe_shared_loras""",
    "drafts are configured in one object; see speculative_config": """
        spec_method spec_model spec_tokens speculative_model num_speculative_tokens ngram_prompt_lookup_max
        ngram_prompt_lookup_min speculative_draft_tensor_parallel_size speculative_disable_by_batch_size
        speculative_max_model_len speculative_model_quantization spec_decoding_acceptance_method""",
    "see runner and convert": "task",
    "requests are logged with enable_log_requests alone": "disable_log_requests",
    "see async_scheduling": "disable_async_output_proc",
    "see pooler_config": "override_pooler_config",
    "text is made by each of api_server_count processes": """
        tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config""",
    "see structured_outputs_config": """
        guided_decoding_backend guided_decoding_disable_fallback guided_decoding_disable_any_whitespace
        guided_decoding_disable_additional_properties""",
    "see logits_processors": "logits_processor_pattern",
    "adapters are those of LoRA; see enable_lora": """
        enable_prompt_adapter max_prompt_adapters max_prompt_adapter_token lora_extra_vocab_size
        long_lora_scaling_factors qlora_adapter_name_or_path""",
    "models write from left to right, a token after the other": "diffusion_config",
    "copies of an engine run on one host (data_parallel_size); on more, start servers and a `quire route`": """
        data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address
        data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb
        data_parallel_multi_port_external_lb data_parallel_supervisor_port dp_supervisor_probe_interval_s
        dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold""",
    "ranks on several machines: see distributed_executor_backend, and `quire worker`": """
        master_addr master_port nnodes node_rank headless worker_use_ray engine_use_ray""",
    "a context is shared out by tensor_parallel_size, and a long prompt by prefill_context_parallel_size": """
        decode_context_parallel_size dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size""",
    "the engine itself decides how ranks start, load and meet": """
        distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus
        disable_custom_all_reduce disable_nccl_for_dp_synchronization max_parallel_loading_workers
        ray_workers_use_nsight worker_cls worker_extension_cls prefill_schedule_interval aggregate_engine_logging
        disable_frontend_multiprocessing""",
    "choose a device with CUDA_VISIBLE_DEVICES": "device_ids",
    "experts are spread by enable_expert_parallel, and moved by enable_eplb, with nothing more to choose": """
        enable_ep_weight_filter all2all_backend enable_dbo ubatch_size enable_elastic_ep
        dbo_decode_token_threshold dbo_prefill_token_threshold expert_placement_strategy
        moe_backend enable_return_routed_experts enable_bf16x3_router_gemm""",
    "models take text and no images, audio or video": """
        language_model_only limit_mm_per_prompt enable_mm_embeds media_io_kwargs mm_processor_kwargs
        mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
        mm_encoder_fp8_scale_save_margin interleave_mm_strings skip_mm_profiling video_pruning_rate mm_tensor_ipc
        mm_ipc_gpu_memory_gb allowed_local_media_path allowed_media_domains disable_chunked_mm_input
        io_processor_plugin renderer_num_workers enable_flash_late_interaction disable_mm_preprocessor_cache""",
    "code that comes with a checkpoint is of the weights' revision": "code_revision",
    "a program's own families are registered: see ModelRegistry": "model_class_overrides",
    "keys of config.json are laid over by hf_overrides": "hf_config_path rope_scaling rope_theta",
    "a model's family decides it": """
        override_attention_dtype mamba_backend
        enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds mamba_cache_dtype mamba_block_size
        mamba_cache_mode gdn_prefill_backend""",
    "weights are streamed from safetensors files": """
        safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
        model_loader_extra_config ignore_patterns pt_load_map_location""",
    "sampling defaults come from generation_config, or from each request": "override_generation_config",
    "log-probabilities are those of the model before sampling": "logprobs_mode use_fp64_gumbel",
    "an engine does not sleep, and its weights stay what they are": """
        enable_sleep_mode enable_cumem_allocator weight_transfer_config""",
    "KV blocks stay on the device and in this engine": """
        kv_transfer_config kv_events_config ec_transfer_config kv_offloading_size kv_offloading_backend
        offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step
        offload_params swap_space""",
    "the KV cache has one layout; see block_size and kv_cache_dtype": """
        calculate_kv_scales kv_cache_dtype_skip_layers kv_sharing_fast_prefill disable_hybrid_kv_cache_manager
        prefix_match_unit prefix_caching_hash_algo disable_sliding_window disable_cascade_attn""",
    "the scheduler decides by itself; see max_num_batched_tokens and max_prefill_chunk": """
        enable_chunked_prefill max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold
        max_num_scheduled_tokens scheduler_cls scheduler_reserve_full_isl watermark num_scheduler_steps
        multi_step_stream_outputs scheduler_delay_factor num_lookahead_slots preemption_mode use_v2_block_manager""",
    "nothing is compiled but kernels; see enforce_eager and cuda_graph_sizes": """
        compilation_config cudagraph_capture_sizes max_cudagraph_capture_size optimization_level performance_mode
        kernel_config ir_op_priority enable_flashinfer_autotune linear_backend attention_config jit_monitor_mode
        jit_monitor_verbose max_seq_len_to_capture max_context_len_to_capture full_cuda_graph""",
    "see reasoning_parser and structured_outputs_config": "reasoning_config",
    "found by the chat template; see reasoning_parser": "enable_reasoning",
    "found by the chat template": "chat_template_content_format",
    "there is nothing of the kind": "additional_config fail_on_environ_validation",
    "/metrics has the numbers, and traces all that there is (otlp_traces_endpoint)": """
        show_hidden_metrics_for_version collect_detailed_traces cudagraph_metrics enable_layerwise_nvtx_tracing
        enable_logging_iteration_details""",
    "the log has one line an event; see log_level, enable_log_requests and QUIRE_LOG_JSON": """
        log_config_file max_log_len enable_log_outputs enable_log_deltas log_error_stack disable_uvicorn_access_log
        disable_access_log_for_endpoints""",
    "TLS takes ssl_keyfile and ssl_certfile; leave the rest to a proxy": """
        ssl_ca_certs enable_ssl_refresh ssl_cert_reqs ssl_ciphers""",
    "the server speaks HTTP/1.1, with limits of its own; see max_body_bytes": """
        grpc middleware h11_max_incomplete_event_size h11_max_header_count""",
    "the documentation pages are off unless enable_docs says otherwise": "disable_fastapi_docs enable_offline_docs",
    "the reply says it by itself, or the request asks for it": """
        response_role return_tokens_as_token_ids enable_prompt_tokens_details
        enable_per_request_metrics enable_server_load_tracking enable_force_include_usage fingerprint_mode
        fingerprint_value""",
    "the server runs no tools": "tool_server",
    "see skip_tokenizer_init": "tokens_only",
}
UNSUPPORTED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Name of an option → why it is not there, or what is instead."""
SHORT = {
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
    "-dpn": "data_parallel_rank", "-dpr": "data_parallel_start_rank", "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address", "-dpp": "data_parallel_rpc_port", "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb", "-dpe": "data_parallel_external_lb", "-n": "nnodes", "-r": "node_rank",
    "-dpm": "data_parallel_multi_port_external_lb", "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size", "-ep": "enable_expert_parallel", "-q": "quantization",
    "-cc": "compilation_config", "-ac": "attention_config", "-sc": "speculative_config", "-dc": "diffusion_config",
    "-asc": "api_server_count", "-O": "optimization_level", "-O0": "optimization_level", "-O1": "optimization_level",
    "-O2": "optimization_level", "-O3": "optimization_level",
}  # fmt: skip
"""Short flags that others have for options."""


def refusal(name: str) -> str | None:
    """Why there is no such option, in one sentence; None for a name that nobody knows."""
    reason = UNSUPPORTED.get(name)
    return sglang.told(name) if reason is None else f"{name} is not supported: {reason}"
