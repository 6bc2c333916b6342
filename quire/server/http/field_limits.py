"""How much one field of a body may hold, in bytes of JSON: seen before objects are made of it."""

from __future__ import annotations

KIB, MIB = 1024, 1024 * 1024
USUAL = 64 * KIB
# Texts, and what stands for texts: as long as a body may be. Their own limits are those of prompts.
TEXTS = (
    "chat_request",
    "choices",
    "completion_request",
    "data_1",
    "data_2",
    "documents",
    "generate_response",
    "generate_responses",
    "input",
    "inputs",
    "instructions",
    "items",
    "messages",
    "prompt",
    "prompt_embeds",
    "queries",
    "query",
    "system",
    "text_1",
    "text_2",
    "texts",
    "token_ids",
    "tokens",
)
# What binds answers has limits of its own in characters, each of which may take six bytes.
OTHERS = {
    "allowed_token_ids": 2 * MIB,
    "chat_template": 2 * MIB,
    "chat_template_kwargs": 256 * KIB,
    "format": 2 * MIB,
    "guided_choice": 2 * MIB,
    "guided_grammar": 512 * KIB,
    "guided_json": 2 * MIB,
    "guided_regex": 512 * KIB,
    "output_config": 2 * MIB,
    "output_format": 2 * MIB,
    "response_format": 2 * MIB,
    "sampling_params": 4 * MIB,
    "structured_outputs": 2 * MIB,
    "text": 2 * MIB,
    "tools": 2 * MIB,
}


def most_bytes(name: str) -> int | None:
    """Of a field; None if only the body's own limit holds."""
    return None if name in TEXTS else OTHERS.get(name, USUAL)
