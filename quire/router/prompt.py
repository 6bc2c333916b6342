"""What of a request's body says where it should go, read off its bytes: a guess need not be parsed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.scheduling.affinity import chain

# Where the beginnings of a prompt end that are told from each other, in bytes: pieces of 128 (about 32 tokens) at
# first, and longer ones the more is before them, so that the longest prompt is a hundred hashes.
ENDS = (*range(128, 4096, 128), *range(4096, 16384, 512), *range(16384, 65536, 2048), *range(65536, 262145, 8192))
BYTES_A_TOKEN = 4
_MODEL = re.compile(rb'"(?:model|lora_name)"\s*:\s*"((?:[^"\\]|\\.)*)"')
_PREVIOUS = re.compile(rb'"previous_response_id"\s*:\s*"([^"\\]+)"')
# What a prompt may begin with, in the bodies of the APIs.
_PROMPT = re.compile(rb'"(?:system|messages|prompt|input|instructions|tools|prompt_token_ids|text|texts)"\s*:')
PROMPTED = frozenset(
    {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate",
        "/generate", "/invocations",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wish:
    """model: that it names, or the adapter to load or unload, "" if none. hashes: of the beginnings of its prompt.
    num_bytes: of the prompt and what follows. previous: id of the stored response that it goes on with."""

    model: str = ""
    hashes: tuple[int, ...] = ()
    num_bytes: int = 0
    previous: str | None = None


def read_wish(path: str, body: bytes, *, hashes: bool = True) -> Wish:
    """What a request of this path and body wants."""
    if not body:
        return Wish()
    named = _MODEL.search(body)
    model = named[1].decode("utf-8", "replace") if named else ""
    if path not in PROMPTED:
        return Wish(model)
    found = _PROMPT.search(body)
    start = found.start() if found else 0
    previous = _PREVIOUS.search(body) if path == "/v1/responses" else None
    return Wish(
        model,
        tuple(chain(memoryview(body)[start:], ENDS, model)) if hashes else (),
        len(body) - start,
        previous[1].decode() if previous else None,
    )
