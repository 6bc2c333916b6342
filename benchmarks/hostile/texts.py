"""Long texts, for `benchmarks.hostile`: prompts of up to 30 MB, wherever a body holds a text."""

from __future__ import annotations

from typing import Any

from benchmarks.hostile.clients import Post

SHORT = "The quick brown fox jumps over the lazy dog. "
KB, MB = 10**3, 10**6
ANSWER = 8  # tokens of an answer that is not refused
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"  # of a model that has none


def words(size: int) -> str:
    return (SHORT * (size // len(SHORT) + 1))[:size]


def one_word(size: int) -> str:
    return "x" * size


def other_letters(size: int) -> str:
    """So many bytes of letters of four bytes each."""
    return "𒀀𒁀𒂀𒃀" * (size // 16)


def completion(text: str) -> Post:
    return Post("/v1/completions", {"prompt": text, "max_tokens": ANSWER, "stream": True})


def cut_completion(text: str) -> Post:
    return Post("/v1/completions", {**completion(text).body, "truncate_prompt_tokens": 16})


def chat(text: str) -> Post:
    messages = [{"role": "user", "content": text}]
    return Post("/v1/chat/completions", {"messages": messages, "max_tokens": ANSWER, "stream": True})


def tokenize(text: str) -> Post:
    return Post("/tokenize", {"prompt": text})


def count_tokens(text: str) -> Post:
    return Post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]})


def embeddings(text: str) -> Post:
    return Post("/v1/embeddings", {"input": text})


SENT = {
    "completion, 1 MB": (completion, words, MB),
    "completion, 1 MB of a word": (completion, one_word, MB),
    "completion, 30 MB": (completion, words, 30 * MB),
    "completion cut, 1 MB": (cut_completion, words, MB),
    "completion cut, 30 MB": (cut_completion, words, 30 * MB),
    "chat, 1 MB": (chat, words, MB),
    "chat, 30 MB": (chat, words, 30 * MB),
    "tokenize, 200 KB": (tokenize, words, 200 * KB),
    "tokenize, 200 KB of a word": (tokenize, one_word, 200 * KB),
    "tokenize, 1 MB": (tokenize, words, MB),
    "tokenize, 1 MB of letters": (tokenize, other_letters, MB),
    "tokenize, 30 MB": (tokenize, words, 30 * MB),
    "count_tokens, 1 MB": (count_tokens, words, MB),
    "count_tokens, 30 MB": (count_tokens, words, 30 * MB),
    "embeddings, 1 MB": (embeddings, words, MB),
    "embeddings, 30 MB": (embeddings, words, 30 * MB),
}
MAKERS = {make(SHORT).path: make for make in (completion, chat, tokenize, count_tokens, embeddings)}


class Texts:
    """paths: that the server has."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._paths = paths

    def hostile(self) -> dict[str, Post]:
        made = {name: make(text(size)) for name, (make, text, size) in SENT.items()}
        return {name: post for name, post in made.items() if post.path in self._paths}

    def harmless(self, post: Post, is_taken: bool) -> Post:
        """A short text to the same place; one of the wrong type is refused."""
        taken = MAKERS[post.path](SHORT)
        refused: dict[str, Any] = {name: 5 for name in ("prompt", "messages", "input") if name in taken.body}
        return taken if is_taken else Post(post.path, {**taken.body, **refused})
