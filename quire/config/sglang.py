"""SGLang's flags, one or more of a meaning a line, and what is here in their place.

For a message to who pastes one, and for docs/migrate_sglang.md.
"""

from __future__ import annotations

TABLE = """
--model-path, --model | MODEL, the first argument
--tokenizer-path | --tokenizer
--tokenizer-mode | --tokenizer-mode
--skip-tokenizer-init | --skip-tokenizer-init
--tokenizer-worker-num | --api-server-count
--load-format | --load-format
--model-loader-extra-config | none: weights are streamed
--trust-remote-code | --trust-remote-code
--model-impl | --model-impl
--revision | --revision
--download-dir | --download-dir
--context-length | --max-model-len
--is-embedding | --runner pooling, found by the model's files
--enable-multimodal | none: models take text
--json-model-override-args | --hf-overrides
--served-model-name | --served-model-name
--chat-template | --chat-template
--completion-template | none: completions are sent as they are
--preferred-sampling-params | --generation-config: a folder with generation_config.json
--dtype | --dtype
--quantization | --quantization
--quantization-param-path | none: scales come with the checkpoint
--kv-cache-dtype | --kv-cache-dtype
--device | --device
--host | --host
--port | --port, 8000 unless given
--api-key | --api-key
--ssl-keyfile, --ssl-certfile | --ssl-keyfile, --ssl-certfile
--file-storage-path | --batch-dir
--mem-fraction-static | --gpu-memory-utilization, a share of the free memory and not of all
--max-total-tokens | --num-gpu-blocks-override, in blocks of --block-size tokens
--page-size | --block-size
--max-running-requests | --max-num-seqs
--max-queued-requests | --max-num-queued-reqs
--chunked-prefill-size | --max-num-batched-tokens for a step, --max-prefill-chunk for one request
--max-prefill-tokens | --max-num-batched-tokens
--enable-mixed-chunk, --enable-dynamic-chunking | always on
--schedule-policy | --scheduling-policy
--enable-priority-scheduling | --scheduling-policy priority
--schedule-conservativeness | none: requests are admitted by need and preempted if it is not met
--disable-radix-cache | --no-enable-prefix-caching
--enable-hierarchical-cache | none: KV blocks stay on the device
--disable-overlap-schedule | --no-async-scheduling
--stream-interval | --stream-interval
--random-seed | --seed
--watchdog-timeout | --hang-timeout
--log-level | --log-level
--log-level-http | --uvicorn-log-level
--log-requests | --enable-log-requests
--enable-metrics | always on: /metrics
--enable-cache-report | always on: usage.prompt_tokens_details
--decode-log-interval | none: the log has a line each second or so; --disable-log-stats for none
--tp-size, --tp, --tensor-parallel-size | --tensor-parallel-size
--dp-size, --dp, --data-parallel-size | --data-parallel-size
--pp-size, --pp, --pipeline-parallel-size | --pipeline-parallel-size
--ep-size, --ep, --expert-parallel-size | --enable-expert-parallel, over the ranks of --tensor-parallel-size
--dist-init-addr, --nccl-init-addr | --distributed-executor-backend external, and a `quire worker` for each rank
--base-gpu-id | CUDA_VISIBLE_DEVICES in the environment
--reasoning-parser | --reasoning-parser, found by the chat template
--tool-call-parser | --tool-call-parser, found by the chat template
--grammar-backend | --structured-outputs-config {"backend": "xgrammar"}
--enable-custom-logit-processor | --logits-processors
--enable-lora | --enable-lora
--lora-paths | --lora-modules
--max-loras-per-batch | --max-loras
--max-lora-rank | --max-lora-rank
--attention-backend | --attention-backend
--sampling-backend | none: one sampler
--speculative-algorithm NGRAM | --speculative-config {"method": "ngram", "num_speculative_tokens": 4}
--speculative-algorithm EAGLE | none yet: drafts come from the text itself
--disable-cuda-graph | --enforce-eager
--cuda-graph-max-bs, --cuda-graph-bs | --cuda-graph-sizes
--enable-torch-compile | none: nothing is compiled
--cpu-offload-gb | none: weights stay on the device
--enable-memory-saver | none: an engine does not sleep
--disaggregation-mode | none: one engine computes prompts and answers
--allow-auto-truncate | `truncate_prompt_tokens` of the request
--enable-deterministic-inference | `seed` of the request, which holds at any load
--skip-server-warmup, --warmups | none: there is no warm-up to skip
"""
NONE = "none: "
"""How a line begins that says why there is nothing."""


def told(name: str) -> str | None:
    """What is here in place of an option of that name, in one sentence; None for a name that is not SGLang's."""
    flag, found = "--" + name.replace("_", "-"), []
    for line in TABLE.strip().splitlines():
        theirs, ours = line.split(" | ", 1)
        found += [(one, ours) for one in theirs.split(", ") if one.split()[0] == flag]
    if not found:
        return None
    if len(found) > 1:  # by its values
        return f"{name} is SGLang's name; here " + "; ".join(f"{one} is {ours}" for one, ours in found)
    ((_, ours),) = found
    if ours.startswith(NONE):
        return f"{name} is not supported: {ours.removeprefix(NONE)}"
    return f"{name} is SGLang's name; here it is {ours}"
