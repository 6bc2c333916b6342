"""The entries of the catalogue, in the order of its pages."""

from __future__ import annotations

from typing import NamedTuple

from quire.foundation.errors import (
    ConfigError,
    ContextLengthError,
    DoesNotFitError,
    EngineDeadError,
    InputError,
    OverloadedError,
    QuireError,
    WeightsError,
)


class Entry(NamedTuple):
    code: str
    cause: str
    remedy: str
    more: str = ""  # what a page has beside both
    kind: type[QuireError] = ConfigError
    fields: tuple[str, ...] = ()  # whose errors have this code; none: given by name, or the last of a class


STARTING = (
    Entry(
        "unknown-command",
        "There is no command of that name.",
        "`quire --help` lists them, `quire bench --help` its kinds; if one is near, the message names it.",
    ),
    Entry(
        "unknown-option",
        "A flag, a keyword or a key of a `--config` file is not an option of this command.",
        "`quire COMMAND --help` lists its options, [the reference](reference.md) all of them; if one is near, the message names it.",
        "Nothing that is not understood is passed over: an option with a typing error would otherwise seem to work.",
    ),
    Entry(
        "bad-value",
        "An option is set to a value that it cannot have.",
        "Give it a value that the message names; [the reference](reference.md) has type, default and meaning of each.",
        "This is the code of every option without a code of its own. The same check is made of flags, keywords of `LLM(...)` "
        "and keys of a `--config` file.",
        ConfigError,
        ("*",),
    ),
    Entry(
        "foreign-option",
        "An option of another engine that Quire does not have.",
        "Leave it out, or use what the message names; [vLLM](migrate_vllm.md) and [SGLang](migrate_sglang.md) have tables.",
        "Options of vLLM that mean something here are taken by their names; the others are refused by name, also where the "
        "engine does by itself what they ask for, so that nothing is ignored unseen.",
    ),
    Entry(
        "config-file",
        "The file of `--config` cannot be read, or is not a YAML mapping of options.",
        "Correct the line that the message names; keys are options as in [the reference](reference.md).",
        fields=("config",),
    ),
    Entry(
        "missing-package",
        "A package that this feature needs is not installed.",
        "Install it where Quire runs; the message has the command if it belongs to [an extra](install.md) of Quire.",
    ),
    Entry(
        "listen",
        "The server cannot listen on its address.",
        "Choose a `--port` that no other process has (0: any free one), and a `--host` that is an address of this machine.",
        fields=("port", "host", "uds"),
    ),
    Entry(
        "api-keys",
        "Keys for clients cannot be read, or one of them is empty.",
        "Check `--api-key-file` (one key a line, readable by the server's user) or unset `QUIRE_API_KEY`.",
        "An empty key would let everybody in, so it is refused and not ignored.",
        fields=("api_key", "api_key_file", "QUIRE_API_KEY"),
    ),
    Entry(
        "tls",
        "The certificate or key for TLS cannot be used.",
        "Give both `--ssl-certfile` and `--ssl-keyfile`, in PEM, without a password, readable by the server's user.",
        fields=("ssl_certfile", "ssl_keyfile"),
    ),
    Entry(
        "folder",
        "A folder or file that is written to cannot be used.",
        "Choose one on a disk with room, which its user may write to; each server needs a `--batch-dir` of its own.",
        fields=("batch_dir", "download_dir"),
    ),
    Entry(
        "file",
        "A file that the command shall read or write cannot be.",
        "Check its path, that it is what the command reads, and the rights of who runs it.",
        fields=("input_file", "output_file", "output_json", "dataset", "results", "plot", "trace"),
    ),
    Entry(
        "device",
        "The device that was asked for is not there.",
        "`quire doctor` says what this machine can run, and why not; `--device cpu` runs anywhere.",
        fields=("device",),
    ),
    Entry(
        "ranks",
        "The model cannot be shared out over so many GPUs.",
        "Choose a `--tensor-parallel-size` that divides what the message names, and that the machine has GPUs for; leave "
        "out `--prefill-context-parallel-size` where the message says that it must be 1.",
        fields=("tensor_parallel_size", "prefill_context_parallel_size"),
    ),
    Entry(
        "attention-backend",
        "The attention backend cannot run this model here.",
        "Leave `--attention-backend` out: the fastest that can is chosen.",
        fields=("attention_backend",),
    ),
    Entry(
        "plugin",
        "A class or file of your own, or of an installed package, cannot be used.",
        "The message says what it lacks; [plugins](plugins.md) has the contract of each kind.",
        fields=("logits_processors", "stat_loggers", "tool_parser_plugin", "reasoning_parser_plugin"),
    ),
    Entry(
        "reply-format",
        "The format of tool calls or of reasoning is not known.",
        "Leave it out: it is found by the model's chat template. [Tool formats](tool_formats.md) lists the names.",
        fields=("tool_call_parser", "reasoning_parser", "tool_parser", "reasoning_format"),
    ),
    Entry(
        "profiler",
        "The profiler cannot be used as it is set up.",
        'Use `{"profiler": "torch", "torch_profiler_dir": FOLDER}` with a folder that may be written to.',
        "See [profiling](profiling.md).",
        fields=("profiler_config",),
    ),
)

MODELS = (
    Entry(
        "model-not-found",
        "The model's folder does not exist.",
        "Check the path. A name without a leading `/`, `.` or `~` and with one `/` is taken for an id on the hub.",
    ),
    Entry(
        "hub",
        "The hub could not deliver the model.",
        "Check the id, the network and, for a gated model, that its terms are accepted and `HF_TOKEN` is set.",
        "The end of the message is what the hub said: 401 and 403 mean a token that is missing or may not read the model, 404 an "
        "id that does not exist (or is private), a name that is not known a machine without network. A model that was "
        "downloaded before is found without network with `HF_HUB_OFFLINE=1`.",
    ),
    Entry(
        "model-files",
        "A file of the model does not say what it should.",
        "Correct what the message names, or lay another value over a key with `--hf-overrides`; fetch files that are cut off again.",
        "Keys of config.json that change what a model computes are honoured or refused, never passed over. A file that was cut off "
        "by a download is best deleted and fetched again.",
        fields=("model", "hf_overrides", "config_format"),
    ),
    Entry(
        "architecture",
        "The model has an architecture that Quire has no family for.",
        "Choose one of [the models](models.md), or try `--model-impl transformers`.",
        "[Adding a model](adding_a_model.md) takes a file of some fifty lines for most decoders.",
    ),
    Entry(
        "remote-code",
        "The model comes with Python code of its own, which is not run unless you say so.",
        "Read that code, then start with `--trust-remote-code`.",
        fields=("trust_remote_code", "model_impl"),
    ),
    Entry(
        "weights",
        "The checkpoint does not fit the model: tensors are missing, too many, or of another shape.",
        "Fetch the checkpoint again; if it was changed, config.json must say so too.",
        "The message lists the tensors. `quire inspect MODEL` reads the files' headers without loading them.",
        WeightsError,
        ("*",),
    ),
    Entry(
        "memory",
        "Weights and one request do not fit into memory.",
        "Lower `--max-model-len`, raise `--gpu-memory-utilization`, quantize (`--quantization fp8`), or use more GPUs.",
        "`quire inspect MODEL --memory 80GiB` says what a model takes before it is downloaded. Memory that another process holds "
        "is not there: `nvidia-smi` names it. The exit code is 3.",
        DoesNotFitError,
        ("*",),
    ),
    Entry(
        "context-size",
        "Sizes of context, batch and steps do not go together.",
        "Leave them out, and they are chosen for model and memory; else keep to the bounds of the message.",
        fields=("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk"),
    ),
    Entry(
        "kv-cache",
        "The KV cache cannot be as it was asked for.",
        "Leave its options out: its size is measured, its type is the model's.",
        fields=(
            "kv_cache_dtype",
            "kv_cache_memory_bytes",
            "cpu_kv_cache_memory_bytes",
            "num_gpu_blocks_override",
            "block_size",
            "gpu_memory_utilization",
        ),
    ),
    Entry(
        "quantization",
        "The way in which weights are quantized is not one that can run.",
        "Leave `--quantization` out for a checkpoint that is quantized; [the methods](quantization.md) are listed.",
        fields=("quantization", "quantization_config"),
    ),
    Entry(
        "tokenizer",
        "The model's tokenizer is missing, broken, or of a form that needs another package.",
        "Name another with `--tokenizer`, or install what the message names; [files](files.md) has the forms.",
        fields=("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"),
    ),
    Entry(
        "chat-template",
        "There is no usable chat template.",
        "Give one with `--chat-template FILE`; it is Jinja, as Hugging Face's models have it.",
        fields=("chat_template", "default_chat_template_kwargs"),
    ),
    Entry(
        "generation-config",
        "The model's sampling defaults are not valid.",
        "Correct generation_config.json, or ignore it with `--generation-config none`.",
        fields=("generation_config",),
    ),
    Entry(
        "adapter",
        "A LoRA adapter cannot be used with this model.",
        "Start with `--enable-lora` and ranks as large as the adapter's; [adapters](lora.md) says what is supported.",
        fields=("lora_path", "lora_modules", "enable_lora", "max_lora_rank", "max_loras", "lora_resolver_dir"),
    ),
    Entry(
        "drafts",
        "Speculative decoding is not set up as it can run.",
        'Start from `--speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'`, on one rank or with '
        "`--tensor-parallel-size`.",
        fields=("speculative_config",),
    ),
    Entry(
        "pooling-setup",
        "The model cannot be run for vectors, or not in the way that was asked for.",
        "Leave `--runner`, `--convert` and `--pooler-config` out: the model's files say how it pools.",
        fields=("pooler_config", "runner", "convert"),
    ),
)

RUNNING = (
    Entry(
        "no-server",
        "No server answers at the address, or it answers with an error.",
        "Check `--url` (http://HOST:PORT/v1) and that the server says `Ready`; a key goes with `--api-key`.",
        kind=InputError,
        fields=("url",),
    ),
    Entry(
        "overloaded",
        "More waits than can be answered in time, so this request is refused at once (HTTP 503).",
        "Ask again after the seconds of `Retry-After`. If it lasts, add replicas or raise `--max-queue-seconds`.",
        "See [overload](api.md#overload).",
        OverloadedError,
        ("*",),
    ),
    Entry(
        "engine-dead",
        "The engine, or the process it runs in, has stopped.",
        "The log says why. A server starts it again by itself; `dmesg` names a process that the system killed for memory.",
        "Under `quire serve` open requests go on in the engine that takes its place ([when something dies](faults.md)). After a few "
        "deaths in a row in which nobody got a token the server leaves with exit code 4.",
        EngineDeadError,
        ("*",),
    ),
    Entry(
        "failed",
        "Something that should work did not, for a reason that the message gives.",
        "Run the command again with `-v`, which shows where; report it if the message does not explain itself.",
        kind=QuireError,
        fields=("*",),
    ),
    Entry(
        "internal",
        "A mistake in Quire: an exception that nobody foresaw.",
        "Run the command again with `-v`, and report the traceback with the output of `quire collect-env`.",
        "Of a server the client gets HTTP 500 without details, which are in the server's log.",
    ),
)

REQUESTS = (
    Entry(
        "bad-field",
        "A field of a request is missing, not known, or has a value that it cannot have (HTTP 400).",
        "Correct the field that `param` names; [the API](api.md) has the fields of each route.",
        "Fields that would change the answer and are not supported are refused by name and not ignored.",
        InputError,
        ("*",),
    ),
    Entry(
        "context-length",
        "The prompt, with the answer that was asked for, is longer than the model's context.",
        "Shorten the conversation or lower `max_tokens`; the server's limit is `--max-model-len`.",
        "The wording is that which coding agents look for to shorten a conversation by themselves.",
        ContextLengthError,
        ("*",),
    ),
    Entry(
        "bad-prompt",
        "The prompt is not of a form that this model takes.",
        "Send text, token ids within the vocabulary, or messages with roles and content.",
        kind=InputError,
        fields=("prompt", "messages", "input", "inputs", "prompt_embeds", "prompt_token_ids", "texts"),
    ),
    Entry(
        "bad-sampling",
        "A sampling parameter is out of its range, or does not go with another.",
        "Keep to the range of the message; [sampling](sampling.md) explains each.",
        kind=InputError,
        fields=(
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "n",
            "seed",
            "max_tokens",
            "min_tokens",
            "stop",
            "stop_token_ids",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
            "allowed_token_ids",
            "bad_words",
            "logprobs",
            "prompt_logprobs",
            "top_logprobs",
            "logprob_token_ids",
            "sampling_params",
            "use_beam_search",
            "repetition_detection",
            "extra_args",
            "truncate_prompt_tokens",
        ),
    ),
    Entry(
        "bad-tools",
        "Tools, or what is said about calling them, cannot be used.",
        "Each tool is a function with a name and a JSON schema of its parameters; `tool_choice` names one of them.",
        kind=InputError,
        fields=("tools", "tool_choice", "parallel_tool_calls"),
    ),
    Entry(
        "bad-grammar",
        "The schema, regex, choice or grammar that shall bind the answer cannot be compiled within its limits.",
        "[Structured outputs](structured_outputs.md) says what is supported; the message names the part that is not.",
        kind=InputError,
        fields=("response_format", "structured_outputs", "output_config", "output_format", "text", "guided_json"),
    ),
    Entry(
        "no-such-model",
        "The request names a model that this server does not serve.",
        "`GET /v1/models` lists them; `--served-model-name` gives the model other names.",
        kind=InputError,
        fields=("model",),
    ),
    Entry(
        "no-images",
        "The request has images, sounds or videos, and this model takes text alone.",
        "Send text, or ask a model that sees.",
        kind=InputError,
        fields=("images",),
    ),
    Entry(
        "unauthorized",
        "The request has no key, or a wrong one (HTTP 401).",
        "Send `Authorization: Bearer KEY` (or `x-api-key`) with a key that the server was started with.",
    ),
    Entry(
        "not-found",
        "There is no such route, model, file, batch or response here, or not with this method (HTTP 404, 405).",
        "Check path and id; [the API](api.md) lists the routes, some of which need an option of the server.",
    ),
    Entry(
        "too-large",
        "The request, or its headers, are larger than the server reads (HTTP 413, 431).",
        "Send less at once; the limits are `--max-body-bytes` and `--max-batch-file-bytes`, and 64 KiB of headers.",
    ),
    Entry(
        "too-slow",
        "The request did not arrive in time (HTTP 408).",
        "Look at the network between; the limits are `--header-timeout` and `--body-timeout`.",
    ),
    Entry(
        "not-supported",
        "The route is one of others' servers, and this one does not have what it asks for (HTTP 501).",
        "Use what the message names instead.",
    ),
    Entry(
        "no-room",
        "The server's disk has no room for the file (HTTP 507).",
        "Delete files that are not needed (`DELETE /v1/files/ID`), or give `--batch-dir` a larger disk.",
    ),
)
