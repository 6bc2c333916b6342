"""Log-probabilities in the two shapes of the API.

Bytes are those that a token adds to the text: joined, they are the text's. A token may hold a part of a character.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.types.output import CompletionOutput, Logprob
from quire.types.sampling import SamplingParams

LOWEST = -9999.0  # stands for -inf, which JSON cannot say
Positions = Sequence[dict[int, Logprob] | None]


class LogprobWriter:
    """Of one answer, in the portions that it comes in. `tokenizer`: None if there is none, and so no text.

    `as_ids` shows tokens as "token_id:N" instead of text. `stop_ids`: tokens that end an answer and are no part of its
    text. `top`: alternatives a token in chat's shape; -1: all.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        stop_ids: AbstractSet[int | None] = frozenset(),
        *,
        as_ids: bool,
        top: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset() if params.include_stop_str_in_output else stop_ids
        self._as_ids = as_ids
        self._top = top
        self._start = 0  # characters before the answer: an echoed prompt
        self._waiting: deque[tuple[int, dict[int, Logprob], int]] = deque()  # tokens of text that is held back: offsets
        self._spelling = None
        if tokenizer is not None:
            self._spelling = tokenizer.decoding.spelling(
                skip_special=params.skip_special_tokens, spaces_between_special=params.spaces_between_special_tokens
            )

    def prompt(self, text: str, token_ids: Sequence[int], positions: Positions) -> dict[str, list[Any]]:
        """The legacy shape, of a prompt that is echoed before the answer."""
        found = _Lists()
        self._start = len(text)
        spelling = None
        if self._tokenizer is not None:  # special tokens that the tokenizer has put around a text are not in it
            is_whole = self._tokenizer.decode(token_ids) == text
            spelling = self._tokenizer.decoding.spelling(skip_special=not is_whole)
        for token_id, entries in zip(token_ids, positions, strict=True):
            offset = 0 if spelling is None else min(spelling.num_chars, len(text))
            self._add(found, token_id, entries, offset)
            if spelling is not None:
                spelling.push(token_id)
        return found.lists

    def completion(self, answer: CompletionOutput, length: int) -> dict[str, list[Any]]:
        """The legacy shape: parallel lists. `length`: characters of the text so far, with the answer's latest.

        A token whose text begins behind that waits: what may be a stop string is held back, and only its end tells
        whether the text, and with it the token's offset, goes on.
        """
        found = _Lists()
        num_shown = self._num_shown(answer)
        for at, (token_id, entries) in enumerate(zip(answer.token_ids, answer.logprobs or (), strict=True)):
            offset = self._start + (0 if self._spelling is None else self._spelling.num_chars)
            self._waiting.append((token_id, entries, offset))
            if self._spelling is not None and at < num_shown:
                self._spelling.push(token_id)
        while self._waiting and (answer.finish_reason is not None or self._waiting[0][2] <= length):
            token_id, entries, offset = self._waiting.popleft()
            self._add(found, token_id, entries, min(offset, length))
        return found.lists

    def chat(self, answer: CompletionOutput) -> dict[str, list[Any]]:
        content = []
        num_shown = self._num_shown(answer)
        for at, (token_id, entries) in enumerate(zip(answer.token_ids, answer.logprobs or (), strict=True)):
            best = sorted(entries.items(), key=lambda item: -item[1].logprob)[: self._top if self._top >= 0 else None]
            others = {i: self._peeked(i) for i, _ in best if i != token_id}
            own = others[token_id] = self._pushed(token_id, is_shown=at < num_shown)
            content.append(
                {
                    **self._chat_entry(token_id, entries[token_id], own),
                    "top_logprobs": [self._chat_entry(i, entry, others[i]) for i, entry in best],
                }
            )
        return {"content": content}

    def _num_shown(self, answer: CompletionOutput) -> int:
        """Tokens that are part of the text: not the one that ended it."""
        count = len(answer.token_ids)
        is_ended = answer.finish_reason == "stop" and not answer.is_cut and count > 0
        return count - 1 if is_ended and answer.token_ids[-1] in self._stop_ids else count

    def _pushed(self, token_id: int, *, is_shown: bool) -> bytes | None:
        if self._spelling is None:
            return None
        return self._spelling.push(token_id) if is_shown else b""

    def _peeked(self, token_id: int) -> bytes | None:
        return None if self._spelling is None else self._spelling.peek(token_id)

    def _chat_entry(self, token_id: int, entry: Logprob, spelled: bytes | None) -> dict[str, Any]:
        return {
            "token": self._text(token_id, entry),
            "logprob": _finite(entry.logprob),
            "bytes": None if spelled is None else list(spelled),
        }

    def _add(self, found: _Lists, token_id: int, entries: dict[int, Logprob] | None, offset: int) -> None:
        entry = entries.get(token_id) if entries else None
        found.tokens.append(self._unique(token_id, entry))
        found.chosen.append(_finite(entry.logprob) if entry else None)
        found.tops.append({self._unique(i, e): _finite(e.logprob) for i, e in entries.items()} if entries else None)
        found.offsets.append(offset)

    def _unique(self, token_id: int, entry: Logprob | None) -> str:
        """The text, or what OpenAI writes for a part of a character: "bytes:\\xe4". Objects are keyed by it."""
        text = self._text(token_id, entry)
        if "\ufffd" not in text or self._tokenizer is None:
            return text
        spelled = self._tokenizer.token_bytes(token_id)
        return text if spelled == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _text(self, token_id: int, entry: Logprob | None) -> str:
        if not self._as_ids:
            if entry is not None and entry.decoded_token is not None:
                return entry.decoded_token
            if entry is None and self._tokenizer is not None:
                return self._tokenizer.token_text(token_id)
        return f"token_id:{token_id}"


class _Lists:
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.chosen: list[float | None] = []
        self.tops: list[dict[str, float] | None] = []
        self.offsets: list[int] = []

    @property
    def lists(self) -> dict[str, list[Any]]:
        return {
            "text_offset": self.offsets,
            "token_logprobs": self.chosen,
            "tokens": self.tokens,
            "top_logprobs": self.tops,
        }


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
