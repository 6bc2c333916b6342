"""Log-probabilities in the two shapes of the API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quire.types.output import Logprob

LOWEST = -9999.0  # stands for -inf, which JSON cannot say


class LogprobWriter:
    """`as_ids` shows tokens as "token_id:N" instead of text: exact, even for parts of a character.

    `decode` makes text of a token that no log-probability came with (the first of an echoed prompt).
    """

    def __init__(self, *, as_ids: bool, top: int, decode: Callable[[list[int]], str] | None) -> None:
        self.as_ids = as_ids
        self.top = top
        self.decode = decode

    def completion(
        self, token_ids: Sequence[int], positions: Sequence[dict[int, Logprob] | None], offset: int
    ) -> dict[str, list[Any]]:
        """The legacy shape: parallel lists. `offset` is the length of the text before the first token."""
        tokens, chosen, tops, offsets = [], [], [], []
        for token_id, entries in zip(token_ids, positions, strict=True):
            entry = entries.get(token_id) if entries else None
            text = self._text(token_id, entry)
            tokens.append(text)
            chosen.append(_finite(entry.logprob) if entry else None)
            tops.append({self._text(i, e): _finite(e.logprob) for i, e in entries.items()} if entries else None)
            offsets.append(offset)
            offset += len(text)
        return {"text_offset": offsets, "token_logprobs": chosen, "tokens": tokens, "top_logprobs": tops}

    def chat(self, token_ids: Sequence[int], positions: Sequence[dict[int, Logprob]]) -> dict[str, list[Any]]:
        content = []
        for token_id, entries in zip(token_ids, positions, strict=True):
            best = sorted(entries.items(), key=lambda item: -item[1].logprob)[: self.top if self.top >= 0 else None]
            content.append(
                {
                    **self._chat_entry(token_id, entries[token_id]),
                    "top_logprobs": [self._chat_entry(i, entry) for i, entry in best],
                }
            )
        return {"content": content}

    def _chat_entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        text = self._text(token_id, entry)
        return {"token": text, "logprob": _finite(entry.logprob), "bytes": list(text.encode("utf-8", "replace"))}

    def _text(self, token_id: int, entry: Logprob | None) -> str:
        if not self.as_ids:
            if entry is not None and entry.decoded_token is not None:
                return entry.decoded_token
            if entry is None and self.decode is not None:
                return self.decode([token_id])
        return f"token_id:{token_id}"


def prompt_logprobs(positions: Iterable[dict[int, Logprob] | None] | None) -> list[dict[str, Any] | None] | None:
    """One object a prompt position, keyed by token id; null for the first, which nothing predicts."""
    if positions is None:
        return None
    return [
        {
            str(i): {"logprob": _finite(e.logprob), "rank": e.rank, "decoded_token": e.decoded_token}
            for i, e in entries.items()
        }
        if entries
        else None
        for entries in positions
    ]


def _finite(value: float) -> float:
    return max(value, LOWEST)
