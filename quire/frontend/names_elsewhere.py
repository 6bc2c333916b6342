"""Names that scripts written for other engines call and that are none here: the error says what to use."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

_NO_SLEEP = "an engine does not sleep: `shutdown` frees the device, and another start takes seconds"
_NO_PAUSE = "an engine does not pause: `abort` ends requests, and what is not asked does not run"
_SAME_WEIGHTS = "weights stay what they are: start another engine, or give adapters (lora_request)"
_NO_MEDIA = "there is no cache of images or sounds; `reset_prefix_cache` forgets cached KV"
_OWN_CONFIG = "the configuration is `info.resolved.config`"
INSTEAD = {
    "sleep": _NO_SLEEP,
    "wake_up": _NO_SLEEP,
    "is_sleeping": _NO_SLEEP,
    "pause_generation": _NO_PAUSE,
    "resume_generation": _NO_PAUSE,
    "is_paused": _NO_PAUSE,
    "init_weight_transfer_engine": _SAME_WEIGHTS,
    "start_weight_update": _SAME_WEIGHTS,
    "start_draft_weight_update": _SAME_WEIGHTS,
    "update_weights": _SAME_WEIGHTS,
    "finish_weight_update": _SAME_WEIGHTS,
    "reset_mm_cache": _NO_MEDIA,
    "reset_encoder_cache": _NO_MEDIA,
    "reward": "use `encode` with pooling_task='classify' or 'token_classify'",
    "enqueue_chat": "use `chat`, or `enqueue` with prompts of get_tokenizer().apply_chat_template",
    "from_vllm_config": "use `from_engine_args`",
    "vllm_config": _OWN_CONFIG,
    "scale_elastic_ep": "the number of cores is that of the start (data_parallel_size)",
    "wait_for_requests_to_drain": "await what `generate` gives, then `shutdown`",
    "do_log_stats": "`get_metrics` of LLM and `stats` of AsyncLLM tell what is counted; stat_loggers log it",
    "is_tracing_enabled": "traces are of servers: see otlp_traces_endpoint",
    "set_tokenizer": "give tokenizer=... to the start",
    "request_counter": "requests are numbered by themselves: an output has its `request_id`",
}


class NamesElsewhere:
    """Who lacks a name of INSTEAD says what to use. To `hasattr` it is none."""

    if not TYPE_CHECKING:  # to a type checker too

        def __getattr__(self, name: str) -> NoReturn:
            kind = type(self).__name__
            instead = f": {INSTEAD[name]}" if name in INSTEAD else ""
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{instead}", name=name, obj=self)
