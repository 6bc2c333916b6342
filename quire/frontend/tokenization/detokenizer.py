"""Text of one answer while it grows: detokenize, look for stop strings, hold back what may become one."""

from __future__ import annotations

from quire.frontend.tokenization.decoding import Decoding, TextStream
from quire.frontend.tokenization.stops import StopAutomaton
from quire.types.sampling import RequestOutputKind, SamplingParams


class Detokenizer:
    """`push` returns text that will never change; `finish` returns the rest.

    The concatenation of both is the decoding of all tokens pushed, cut at the stop string if one was found. A stop
    string counts once a token after the first `min_tokens` completes it.
    """

    def __init__(self, decoding: Decoding, params: SamplingParams, automaton: StopAutomaton | None) -> None:
        self._stream: TextStream = decoding.stream(
            skip_special=params.skip_special_tokens,
            spaces_between_special=params.spaces_between_special_tokens,
        )
        self._automaton = automaton
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""  # certain text that is not given out yet
        self._state = 0  # of the automaton, after the held text
        self._probed = ""  # pending text of the stream, read ahead: a stop string in it counts at once …
        self._probe_state = 0  # … and this is the automaton's state after it
        self.stop: str | None = None  # the stop string that was found

    def push(self, token_id: int) -> str:
        """Add a token. When `stop` is set afterwards, this token completed it and nothing more may be pushed."""
        self._num_tokens += 1
        certain = self._stream.push(token_id)
        if self._automaton is None:
            return certain
        text = certain or self._stream.pending
        # Pending text mostly comes back as it was, only longer or certain: each character is read once.
        is_known = text.startswith(self._probed)
        read = len(self._probed) if is_known else 0
        state, match = self._automaton.feed(
            self._probe_state if is_known else self._state,
            text[read:],
            may_match=self._num_tokens > self._min_tokens,
        )
        if match:
            return self._cut(self._held + text, len(self._held) + read + match.end, match.stop)
        self._probe_state = state
        if certain:
            self._held, self._state, self._probed = self._held + certain, state, ""
        else:
            self._probed = text
        keep = self._automaton.held_back(self._state)
        free = len(self._held) - keep
        news, self._held = self._held[:free], self._held[free:]
        return news

    def finish(self) -> str:
        """The answer has ended: all text still held back."""
        return "" if self.stop is not None else self._held + self._stream.flush()

    def _cut(self, text: str, end: int, stop: str) -> str:
        self.stop = stop
        return text[: end if self._include_stop else end - len(stop)]


def can_wait(decoding: Decoding, params: SamplingParams) -> bool:
    """Whether the text is wanted only at the end, and one decoding of all tokens gives it."""
    plain_spaces = decoding.is_exact or params.skip_special_tokens or params.spaces_between_special_tokens
    return params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop and plain_spaces
