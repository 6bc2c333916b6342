"""The HTTP server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from quire.config.engine import EngineConfig
from quire.config.options import AboveZero, NotNegative, Options, Positive, Seconds
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown


class LoraModule(msgspec.Struct, frozen=True):
    """An adapter that a server starts with."""

    name: str
    path: str
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False  # the tensors' shapes say it

    @classmethod
    def read(cls, given: str) -> LoraModule:
        """name=path, or a JSON object. Raises ConfigError."""
        name, _, path = given.partition("=")
        try:
            found = msgspec.json.decode(given, type=cls) if given.lstrip().startswith("{") else cls(name, path)
        except msgspec.DecodeError as error:
            raise ConfigError(f"lora_modules: {shown(given)} is no adapter: {error}", "lora_modules") from None
        if not found.name or not found.path:
            raise ConfigError(
                f"lora_modules must be name=path, or a JSON object with both, got {shown(given)}", "lora_modules"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Options):
    host: str = "127.0.0.1"
    """Address to bind."""
    port: NotNegative = 8000
    """Port to bind; 0: any free one (it is printed)."""
    uds: str | None = None
    """Unix socket to bind instead of host and port."""
    api_server_count: Positive = 1
    """Processes that answer HTTP, on one port and one engine. More than 1: where one process cannot write as many
    streams as the model makes tokens; each takes a core."""
    api_key: list[str] = field(default_factory=list)
    """Keys clients present as `Authorization: Bearer KEY`; all routes but the health probes then need one."""
    api_key_file: str | None = None
    """File with one key a line, with its name behind " # " if it shall have one in logs and metrics."""
    allowed_origins: list[str] = field(default_factory=list)
    """CORS origins; none given: CORS is off."""
    allow_credentials: bool = False
    """CORS: allow credentials."""
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    """CORS: allowed methods."""
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    """CORS: allowed headers."""
    root_path: str = ""
    """Path prefix when behind a proxy (/llm), which may cut it off or not."""
    ssl_keyfile: str | None = None
    """TLS key."""
    ssl_certfile: str | None = None
    """TLS certificate."""
    enable_auto_tool_choice: bool = True
    """Find tool calls in the answers of models whose format is known; off: only forced calls are found."""
    exclude_tools_when_tool_choice_none: bool = False
    """Do not show the model the tools of a request that says tool_choice "none"."""
    trust_request_chat_template: bool = False
    """Let requests bring a chat template of their own."""
    enable_tokenizer_info_endpoint: bool = False
    """Serve /tokenizer_info: the tokenizer's configuration, its chat template included."""
    lora_modules: list[str] = field(default_factory=list)
    """LoRA adapters to start with, each a model's name of its own: name=path, or a JSON object with name, path and
    base_model_name."""
    lora_resolver_dir: str | None = None
    """Folder of adapters, each in a folder of its own, that are loaded when a request first names one. None: there is
    none."""
    allow_runtime_lora_updating: bool = False
    """Serve POST /v1/load_lora_adapter and /v1/unload_lora_adapter: whoever may send requests may then have any adapter
    of this machine loaded."""
    max_body_bytes: Positive = 32 * 1024 * 1024
    """Largest request body."""
    response_store_bytes: NotNegative = 256 * 1024 * 1024
    """Memory for stored responses of /v1/responses, the least recently used of which go first; 0: none are stored.
    With several front ends each has its share."""
    batch_dir: str | None = None
    """Directory for the files and batches of /v1/files and /v1/batches, used by one server at a time. None:
    quire/batches in the user's cache folder."""
    max_batch_file_bytes: Positive = 200 * 1024 * 1024
    """Largest file of /v1/files."""
    max_batch_lines: Positive = 50_000
    """Most requests of one batch."""
    shutdown_grace: Seconds = 0.0
    """Seconds after SIGTERM in which new requests are still accepted, while /readyz already says 503."""
    shutdown_timeout: Seconds = 30.0
    """Seconds after the grace in which running requests may finish before they are aborted."""
    keepalive_interval: Seconds = 15.0
    """Seconds of silence after which a stream says that it lives (a comment, to Anthropic's clients a ping), so that
    no proxy takes it for dead; 0: it stays silent."""
    timeout_keep_alive: Seconds = 5.0
    """Seconds that a connection stays open for another request."""
    header_timeout: Seconds = 60.0
    """Seconds in which a new connection must bring its first request's line and headers, and those of a further request
    must be complete once they have begun; else HTTP 408 (nothing if nothing came); 0: no limit."""
    body_timeout: Seconds = 60.0
    """Seconds in which a request's body must bring 1 KiB a second on average, while it is read; else HTTP 408; 0: no
    limit."""
    send_timeout: Seconds = 60.0
    """Seconds after which a client that takes nothing of what is there for it is cut off, and its request aborted. A
    stream that has nothing to send may be silent for longer. 0: no limit."""
    hang_timeout: AboveZero = 20.0
    """Seconds without a finished step, with work queued, or without an answer to a ping, after which /health and
    /readyz say 503. Of several front ends, one without a sign of life for so long is killed and started again."""
    ping_interval: Seconds = 5.0
    """Seconds of silence after which an engine, usually an idle one, is asked for a sign of life; 0: never."""
    uvicorn_log_level: str = "warning"
    """Log level of the HTTP server itself."""
    enable_request_id_headers: bool = True
    """Every reply, errors and probes too, has an X-Request-Id: the request's own, or else a new one."""
    server_dev_mode: bool = False
    """Serve what is for development alone: POST /reset_prefix_cache and GET /server_info."""
    enable_dashboard: bool = True
    """Serve /dashboard: what the server does, for people, and a playground."""
    otlp_traces_endpoint: str | None = None
    """Where traces of requests go: an OpenTelemetry collector, by OTEL_EXPORTER_OTLP_TRACES_PROTOCOL (grpc, the
    default, or http/protobuf). None: nothing is traced."""
    enable_access_log: bool = False
    """Log a line for every request that is counted: id, the key's name, route, status, tokens and times, never text; as
    JSON with QUIRE_LOG_JSON."""
    enable_docs: bool = False
    """Serve /docs and /openapi.json."""

    @property
    def prefix(self) -> str:
        """The root path with a slash before it and none behind; "": there is none."""
        parts = self.root_path.strip("/")
        return f"/{parts}" if parts else ""

    def modules(self) -> list[LoraModule]:
        """The adapters to start with. Raises ConfigError for what is none."""
        return [LoraModule.read(one) for one in self.lora_modules]

    def check_adapters(self, engine: EngineConfig) -> None:
        """Raises ConfigError for options about adapters of an engine that takes none, and of several front ends; for
        adapters whose names are taken, or whose config says that they cannot be used: before a model is loaded."""
        given = {
            "lora_modules": bool(self.modules()),
            "lora_resolver_dir": self.lora_resolver_dir is not None,
            "allow_runtime_lora_updating": self.allow_runtime_lora_updating,
        }
        for name, is_given in given.items():
            if is_given and not engine.lora.enable_lora:
                raise ConfigError(f"{name} needs enable_lora", name)
        if self.allow_runtime_lora_updating and self.api_server_count > 1:
            raise ConfigError(
                "allow_runtime_lora_updating needs api_server_count=1: each front end knows its own adapters",
                "allow_runtime_lora_updating",
            )
        from quire.config.peft import PeftConfig
        from quire.config.resolve import locate_adapter  # not for who asks for help

        if self.lora_resolver_dir is not None and not Path(self.lora_resolver_dir).expanduser().is_dir():
            raise ConfigError(f"lora_resolver_dir: {self.lora_resolver_dir!r} is no folder", "lora_resolver_dir")
        names = engine.model.names
        taken = set(names)
        for module in self.modules():
            if module.name in taken:
                raise ConfigError(f"lora_modules: the name {module.name!r} is taken", "lora_modules")
            taken.add(module.name)
            if module.base_model_name is not None and module.base_model_name not in names:
                raise ConfigError(
                    f"lora_modules: {module.name!r} is for {module.base_model_name!r}, and {names[0]!r} is served",
                    "lora_modules",
                )
            try:
                PeftConfig.read(locate_adapter(module.path, engine.model), engine.lora.max_lora_rank)
            except ConfigError as error:
                raise ConfigError(f"lora_modules: {module.name}: {error}", "lora_modules", code=error.code) from None
