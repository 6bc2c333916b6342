"""The chat template of a tokenizer in Mistral's own form, whose prompts are code of mistral-common."""

from __future__ import annotations

from pathlib import Path


def chat_template(file: Path) -> tuple[str, str]:
    """The template that renders what mistral-common encodes, and "", or "" and why there is none."""
    try:
        from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
    except ImportError:
        return "", (
            f"{file.name} comes without a chat template: pip install 'quire[mistral]' makes it one, or name one with "
            "--chat-template; prompts need none"
        )
    try:
        return convert_tokenizer_to_chat_template(file), ""
    except Exception as error:  # of a library, for a file that it alone understands
        return "", f"{file.name}: mistral-common makes no chat template of it: {error}"
