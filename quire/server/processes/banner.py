"""What a person reads when the server is ready: what runs, how much fits, how to talk to it."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import quire
from quire.server.service import Service
from quire.types.kv import tokens_held

if TYPE_CHECKING:
    from quire.engine.client import EngineInfo

GIB = 1024**3
MAX_NOTES = 6
ENGINE = "engine"
SHOWN = 0.005  # seconds; what took less is not worth a word


def address_of(listener: socket.socket, *, tls: bool) -> str:
    """The base URL (or curl's words for it) of a listening socket."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"--unix-socket {name} http://localhost"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(name[0], name[0])
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{'https' if tls else 'http'}://{host}:{name[1]}"


def tell_ready(
    service: Service, info: EngineInfo, listener: socket.socket, has_keys: bool, start: dict[str, float], total: float
) -> None:
    """Print `ready_lines`. Where nothing can be written (a full disk, a reader that has left) the server runs all the
    same."""
    with contextlib.suppress(OSError):
        print(*ready_lines(service, info, listener, has_keys, start, total), sep="\n", flush=True)


def ready_lines(
    service: Service, info: EngineInfo, listener: socket.socket, has_keys: bool, start: dict[str, float], total: float
) -> list[str]:
    """At most 15 lines. start: seconds by what was done since the process was started, those of the engine as ENGINE;
    total: all of them."""
    resolved, report = info.resolved, info.report
    tokens = tokens_held(report.groups, report.num_blocks, report.max_model_len)
    kept = f"KV cache: {tokens:,} tokens, {report.kv_bytes / GIB:.2f} GiB; " if report.kv_bytes else ""
    phases = start_phases(start, report.phases)
    times = [f"{name} {seconds:.2f}" for name, seconds in phases.items() if seconds >= SHOWN]
    notes = list(dict.fromkeys([*resolved.notes, *report.notes]))
    url = address_of(listener, tls=service.serve.ssl_certfile is not None)
    key = '-H "Authorization: Bearer $QUIRE_API_KEY" ' if has_keys else ""
    path, question = "v1/chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'
    if resolved.pooler is not None:
        path, question = "v1/embeddings" if resolved.pooler.kind == "embed" else "classify", '"input": "Hello!"'
    body = f'{{"model": "{service.names[0]}", {question}}}'
    lines = [
        f"Quire {quire.__version__} serves {service.names[0]} ({resolved.info.architecture}, {resolved.dtype}) "
        f"on {report.device}",
        *(f"  {note}" for note in notes[:MAX_NOTES]),
        f"{kept}context {info.max_model_len:,} tokens; {resolved.max_num_seqs} requests at once",
        f"Started in {total:.2f} s: {', '.join(times)}",
        f"Ready: {url}",
        f"  curl {url}/{path} {key}-H 'Content-Type: application/json' -d '{body}'",
    ]
    is_open = listener.family != socket.AF_UNIX
    if service.serve.enable_dashboard and is_open:
        lines.append(f"  Dashboard: {url}/dashboard")
    if not has_keys and is_open and not listener.getsockname()[0].startswith(("127.", "::1")):
        lines.append("  Anyone who reaches this address may use it: no API key is set (api_key, api_key_file)")
    return lines


def start_phases(start: dict[str, float], worker: dict[str, float]) -> dict[str, float]:
    """What took the start-up's time, in order. worker: what the engine's time was for, but for its process."""
    phases: dict[str, float] = {}
    for name, seconds in start.items():
        if name == ENGINE:
            phases |= {"engine process": max(seconds - sum(worker.values()), 0.0), **worker}
        else:
            phases[name] = seconds
    return phases
