"""Incremental text is exact: the same as decoding everything, for any ids, cut in any way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders

from quire.frontend.tokenization.decoding import REPLACEMENT, Decoding
from quire.frontend.tokenization.detokenizer import Detokenizer, can_wait
from quire.frontend.tokenization.stops import StopAutomaton
from quire.types.sampling import RequestOutputKind, SamplingParams
from tests.effort import some
from tests.frontend.tokenizers_for_tests import byte_fallback, byte_level, word_level

EXACT = {"byte_level": byte_level(), "strip": byte_fallback(), "no_strip": byte_fallback(strip=False)}
DECODINGS = {name: Decoding(raw) for name, raw in EXACT.items()}
TEXTS = [
    "Hello world",
    " leading space",
    "  two",
    "\n\nlines\n",
    "你好，世界。龘",
    "👩‍👩‍👧‍👦🏳️‍🌈👋🏽",
    "e\u0301e\u0301 नमस्ते",
    "",
    "STOP",
]


def ids_for(name: str) -> st.SearchStrategy[list[int]]:
    """Random ids (bytes of broken characters, unknown ids and specials among them), real texts, and mixes."""
    raw = EXACT[name]
    size = raw.get_vocab_size()
    some = st.lists(st.integers(0, size + 3), max_size=12)
    in_bytes = [i for token, i in raw.get_vocab().items() if len(token) == 1 or token.startswith("<0x")]
    text = st.one_of(st.sampled_from(TEXTS), st.text(max_size=12)).map(
        lambda t: raw.encode(t.encode(errors="ignore").decode(), add_special_tokens=False).ids
    )
    part = st.one_of(some, text, st.lists(st.sampled_from(sorted(in_bytes)), max_size=8))
    return st.lists(part, max_size=4).map(lambda parts: [i for p in parts for i in p])


def reference(raw: RawTokenizer, ids: list[int], skip_special: bool = True) -> str:
    return raw.decode(ids, skip_special_tokens=skip_special)


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=some(400), deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_stream_equals_full_decode(name: str, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(ids_for(name))
    stream = DECODINGS[name].stream(skip_special=skip)
    parts = [stream.push(i) for i in ids]
    assert "".join(parts) + stream.flush() == reference(EXACT[name], ids, skip)


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=some(200), deadline=None)
@given(data=st.data())
def test_every_prefix_is_a_prefix_and_pending_completes_it(name: str, data: st.DataObject) -> None:
    ids = data.draw(ids_for(name))
    stream, text = DECODINGS[name].stream(), ""
    for count, token in enumerate(ids, 1):
        text += stream.push(token)
        so_far = reference(EXACT[name], ids[:count])
        assert so_far.startswith(text)
        rest = so_far[len(text) :]
        assert rest == stream.pending or rest.strip(REPLACEMENT) == ""


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("text", TEXTS)
def test_valid_text_never_shows_replacement_characters(name: str, text: str) -> None:
    stream = DECODINGS[name].stream()
    parts = [stream.push(i) for i in EXACT[name].encode(text, add_special_tokens=False).ids]
    assert REPLACEMENT not in "".join(parts)
    assert "".join(parts) + stream.flush() == text


def test_a_character_in_four_tokens_comes_out_once_complete() -> None:
    ids = EXACT["byte_level"].encode("🦄", add_special_tokens=False).ids
    assert len(ids) > 1
    stream = DECODINGS["byte_level"].stream()
    assert [stream.push(i) for i in ids] == [""] * (len(ids) - 1) + ["🦄"]


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    ids = EXACT["byte_level"].encode("🦄", add_special_tokens=False).ids[:-1]
    stream = DECODINGS["byte_level"].stream()
    assert "".join(stream.push(i) for i in ids) == ""
    assert stream.flush() == REPLACEMENT


WINDOWS = {"words": word_level(), "metaspace": byte_fallback(decoder=decoders.Metaspace())}


@pytest.mark.parametrize("name", WINDOWS)
@settings(max_examples=some(200), deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_unknown_decoders_decode_windows(name: str, data: st.DataObject, skip: bool) -> None:
    raw = WINDOWS[name]
    ids = data.draw(st.lists(st.integers(0, raw.get_vocab_size() - 1), max_size=12))
    decoding = Decoding(raw)
    assert not decoding.is_exact
    stream = decoding.stream(skip_special=skip)
    parts = [stream.push(i) for i in ids]
    assert "".join(parts) + stream.flush() == reference(raw, ids, skip)


def test_spaces_between_special_tokens_can_be_dropped() -> None:
    raw = word_level()
    ids = [raw.token_to_id(t) for t in ("Hello", "<|start|>", "<|end|>", "hello")]
    texts = {}
    for spaces in (True, False):
        stream = Decoding(raw).stream(skip_special=False, spaces_between_special=spaces)
        texts[spaces] = "".join(stream.push(i) for i in ids)
    assert texts == {True: "Hello <|start|> <|end|> hello", False: "Hello <|start|><|end|> hello"}


# Stop strings


def naive(raw: RawTokenizer, ids: list[int], params: SamplingParams) -> tuple[str, str | None, int]:
    """Decode everything after each token and search: text, stop string, tokens used."""
    seen = 0
    for count in range(1, len(ids) + 1):
        text = reference(raw, ids[:count])
        complete = text.rstrip(REPLACEMENT) if REPLACEMENT in text else text
        ends = [
            (at + len(stop), -len(stop), stop)
            for stop in params.stop
            for at in range(len(complete))
            if complete.startswith(stop, at) and (at + len(stop) > seen)
        ]
        if count > params.min_tokens and ends:
            end, _, stop = min(ends)
            return text[: end if params.include_stop_str_in_output else end - len(stop)], stop, count
        seen = len(complete)
    return reference(raw, ids), None, len(ids)


def run(decoding: Decoding, ids: list[int], params: SamplingParams) -> tuple[list[str], str | None, int]:
    detokenizer = Detokenizer(decoding, params, StopAutomaton(params.stop) if params.stop else None)
    parts = []
    for count, token in enumerate(ids, 1):
        parts.append(detokenizer.push(token))
        if detokenizer.stop is not None:
            return parts, detokenizer.stop, count
    return [*parts, detokenizer.finish()], None, len(ids)


STOPS = st.lists(
    st.one_of(
        st.sampled_from(
            ["\n", "\n\n", "STOP", "世", "。", "the", "he", "e", " ", "User:", "👋🏽", "e\u0301", "aab", "aa"]
        ),
        st.text("abe\n 世\u0301", min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=some(600), deadline=None)
@given(data=st.data(), stop=STOPS, include=st.booleans(), min_tokens=st.sampled_from([0, 0, 1, 3]))
def test_stop_strings_equal_the_naive_search(
    name: str, data: st.DataObject, stop: list[str], include: bool, min_tokens: int
) -> None:
    raw = EXACT[name]
    text = data.draw(st.lists(st.sampled_from([*TEXTS, "aaab", "aab", "\n", "the", "龘\n"]), max_size=5).map("".join))
    ids = raw.encode(text, add_special_tokens=False).ids
    params = SamplingParams(stop=stop, include_stop_str_in_output=include, max_tokens=None, min_tokens=min_tokens)
    parts, found, used = run(DECODINGS[name], ids, params)
    assert ("".join(parts), found, used) == naive(raw, ids, params)


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=some(300), deadline=None)
@given(data=st.data(), stop=STOPS)
def test_stop_strings_in_any_ids(name: str, data: st.DataObject, stop: list[str]) -> None:
    ids = data.draw(ids_for(name))
    params = SamplingParams(stop=stop, max_tokens=None)
    parts, found, used = run(DECODINGS[name], ids, params)
    text = reference(EXACT[name], ids[:used])
    assert text.startswith("".join(parts))
    assert (found is None) == ("".join(parts) == text and not any(s in text for s in stop))


@pytest.mark.parametrize(("stop", "held"), [("\n\n", ""), ("User:", "Us"), ("sz", "s"), ("zz", "")])
def test_only_what_may_become_a_stop_string_is_held_back(stop: str, held: str) -> None:
    raw, params = EXACT["byte_level"], SamplingParams(stop=[stop])
    ids = [raw.token_to_id(t) for t in ("a", "Ċ", "U", "s")]
    detokenizer = Detokenizer(DECODINGS["byte_level"], params, StopAutomaton([stop]))
    parts = [detokenizer.push(i) for i in ids]
    assert "".join(parts) == "a\nUs".removesuffix(held)
    assert "".join(parts) + detokenizer.finish() == "a\nUs"


def test_a_newline_byte_token_stops_at_once() -> None:
    raw = EXACT["strip"]
    ids = [*raw.encode("the end", add_special_tokens=False).ids, raw.token_to_id("<0x0A>")]
    parts, stop, used = run(DECODINGS["strip"], [*ids, *ids], SamplingParams(stop="\n"))
    assert ("".join(parts), stop, used) == ("the end", "\n", len(ids))


def test_the_longest_of_two_stops_that_end_together_wins() -> None:
    raw = EXACT["byte_level"]
    ids = raw.encode("say STOP now", add_special_tokens=False).ids
    parts, stop, _ = run(DECODINGS["byte_level"], ids, SamplingParams(stop=["OP", " STOP", "STOP"]))
    assert ("".join(parts), stop) == ("say", " STOP")


def test_waiting_is_allowed_only_when_one_decoding_is_the_same() -> None:
    final = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    exact, windows = DECODINGS["strip"], Decoding(word_level())
    assert can_wait(exact, final)
    assert not can_wait(exact, final.clone(stop=["x"]))
    assert not can_wait(exact, final.clone(output_kind=RequestOutputKind.DELTA))
    squeezed = final.clone(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert can_wait(exact, squeezed)
    assert not can_wait(windows, squeezed)


@pytest.mark.parametrize("name", EXACT)
def test_token_bytes_keep_the_leading_space(name: str) -> None:
    raw, decoding = EXACT[name], DECODINGS[name]
    ids = raw.encode("the end, 龘", add_special_tokens=False).ids
    assert b"".join(decoding.token_bytes(i) for i in ids).decode().lstrip() == "the end, 龘"
    assert decoding.token_bytes(10**6) == b""


def test_a_text_may_begin_with_spaces_of_which_the_decoder_drops_one() -> None:
    raw = WINDOWS["metaspace"]
    stream = Decoding(raw).stream()
    assert [stream.push(raw.token_to_id("▁")) for _ in range(3)] == ["", " ", " "]
