"""The bytes of tokens, joined, are those of the text, and offsets lie in it: of any tokenizer, in any portions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders

from quire.frontend.outputs import Answer
from quire.frontend.replies import ReplyPlan, ReplyWish
from quire.frontend.reply_formats import Formats
from quire.frontend.tokenization.stops import stop_automaton
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.server.generate.answer import ContentLogprobs
from quire.server.generate.logprobs import LogprobWriter
from quire.types.output import CompletionOutput, EngineOutput, TokenLogprobs
from quire.types.sampling import RequestOutputKind, SamplingParams
from tests.frontend.tokenizers_for_tests import CORPUS, byte_fallback, byte_level, save_folder, word_level, word_piece

FAMILIES: dict[str, Any] = {
    "byte-level BPE": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback, nothing stripped": lambda: byte_fallback(strip=False),
    "WordPiece": word_piece,
    "words": word_level,
}
TEXTS = [*CORPUS[:5], "猫👩‍👩‍👧‍👦", "   two  spaces ", "x"]


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_folder(tmp_path_factory.mktemp("tokenizer"), FAMILIES[request.param]()))


def sequences(tokenizer: Tokenizer) -> list[list[int]]:
    """Texts as they are tokenized, some that are cut within a character, and any tokens after one another."""
    rng = random.Random(7)
    found = [tokenizer.encode(text) for text in TEXTS]
    found += [ids[: rng.randrange(len(ids))] for ids in found if len(ids) > 1]
    return found + [[rng.randrange(len(tokenizer)) for _ in range(30)] for _ in range(20)]


def portions(
    tokenizer: Tokenizer, ids: list[int], params: SamplingParams, stop_id: int | None = None
) -> list[CompletionOutput]:
    """The answer as it is told, three tokens at a time; every other token is an alternative of each."""
    answer = Answer(0, "", params, tokenizer, stop_automaton(tuple(params.stop)) if params.stop else None)
    told = []
    all_ids = ids if stop_id is None else [*ids, stop_id]
    for at in range(0, len(all_ids), 3):
        part = all_ids[at : at + 3]
        is_last = at + 3 >= len(all_ids)
        reason = "length" if stop_id is None else "stop"
        scores = [TokenLogprobs([i, i, (i + 1) % len(tokenizer)], [-1.0, -1.0, -2.0], 1) for i in part]
        answer.add(
            EngineOutput(request_id="", token_ids=part, logprobs=scores, finish_reason=reason if is_last else None)
        )
        told.append(answer.take(delta=True))
        if told[-1].finish_reason is not None:
            break
    return told


def writer(tokenizer: Tokenizer, params: SamplingParams, *stop_ids: int) -> LogprobWriter:
    return LogprobWriter(tokenizer, params, set(stop_ids), as_ids=False, top=5)


def check_bytes(tokenizer: Tokenizer, joined: bytes, text: str) -> None:
    """SentencePiece's first word keeps its space. What is no UTF-8 is U+FFFD in the text, here it is itself."""
    if "\ufffd" not in text:
        assert text.encode() in (joined, joined.removeprefix(b" "))
    elif isinstance(tokenizer.raw.decoder, decoders.ByteLevel):
        assert joined.decode("utf-8", "replace") == text
    else:  # all of a run of bytes is U+FFFD if any of it is
        whole = iter(joined.decode("utf-8", "ignore"))
        assert all(character in whole for character in text.replace("\ufffd", ""))


@pytest.mark.parametrize("skip", [True, False])
def test_chat(tokenizer: Tokenizer, skip: bool) -> None:
    params = SamplingParams(logprobs=2, skip_special_tokens=skip, output_kind=RequestOutputKind.DELTA)
    for ids in sequences(tokenizer):
        told = portions(tokenizer, ids, params)
        writes = writer(tokenizer, params)
        entries = [entry for part in told for entry in writes.chat(part)["content"]]
        assert len(entries) == len(ids)
        check_bytes(tokenizer, b"".join(bytes(e["bytes"]) for e in entries), "".join(part.text for part in told))
        for token, entry in zip(ids, entries, strict=True):
            own = next(e for e in entry["top_logprobs"] if e["logprob"] == entry["logprob"])
            assert own == {k: v for k, v in entry.items() if k != "top_logprobs"}
            assert entry["token"] == tokenizer.token_text(token)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_completions(tokenizer: Tokenizer, is_streamed: bool) -> None:
    params = SamplingParams(logprobs=2, output_kind=RequestOutputKind.DELTA)
    for ids in sequences(tokenizer):
        told = portions(tokenizer, ids, params)
        text = "".join(part.text for part in told)
        writes, offsets, tokens, length = writer(tokenizer, params), [], [], 0
        for part in told:
            length += len(part.text)
            lists = writes.completion(part, length if is_streamed else len(text))
            assert all(offset <= length or not is_streamed for offset in lists["text_offset"])
            offsets += lists["text_offset"]
            tokens += lists["tokens"]
        assert offsets == sorted(offsets)
        assert all(0 <= offset <= len(text) for offset in offsets)
        if "\ufffd" not in text and tokenizer.decoding.is_exact:
            skipped = tokenizer.all_special_ids
            spelled = [b"" if i in skipped else read(token) for i, token in zip(ids, tokens, strict=True)]
            check_bytes(tokenizer, b"".join(spelled), text)
        if "\ufffd" not in text and not is_streamed:
            for offset, token in zip(offsets, ids, strict=True):
                plain = tokenizer.token_text(token).strip()
                assert (
                    token in tokenizer.all_special_ids
                    or "\ufffd" in plain
                    or "##" in plain
                    or (text[offset:].lstrip().startswith(plain))
                )


@pytest.mark.parametrize("includes_stop", [True, False])
def test_streamed_completions_add_up(tokenizer: Tokenizer, includes_stop: bool) -> None:
    """Also where text is held back that may be a stop string, and is one or not."""
    for ids in filter(None, sequences(tokenizer)):
        text = tokenizer.decode(ids)
        for at, end in ((0, ""), (len(text) // 2, ""), (len(text) // 3, "\0"), (len(text) - 3, "\0")):
            stop = text[max(at, 0) : at + 5] + end
            params = SamplingParams(
                logprobs=2,
                stop=[stop] if stop else [],
                include_stop_str_in_output=includes_stop,
                output_kind=RequestOutputKind.DELTA,
            )
            told = portions(tokenizer, ids, params)
            writes, length = writer(tokenizer, params), 0
            streamed: dict[str, list[Any]] = {}
            for part in told:
                length += len(part.text)
                for name, values in writes.completion(part, length).items():
                    streamed.setdefault(name, []).extend(values)
            whole = CompletionOutput(
                0,
                "".join(part.text for part in told),
                [i for part in told for i in part.token_ids],
                logprobs=[entry for part in told for entry in part.logprobs or ()],
                finish_reason=told[-1].finish_reason,
                stop_reason=told[-1].stop_reason,
            )
            assert streamed == writer(tokenizer, params).completion(whole, len(whole.text))


def read(token: str) -> bytes:
    """The bytes of a token as the legacy shape shows it."""
    if token.startswith("bytes:"):
        return bytes(int(part, 16) for part in token.removeprefix("bytes:").split("\\x")[1:])
    return token.encode()


def test_responses(tokenizer: Tokenizer) -> None:
    """The content's tokens, without the one that ends the answer."""
    params = SamplingParams(logprobs=2, output_kind=RequestOutputKind.DELTA)
    stop_id = 0
    for ids in sequences(tokenizer):
        ids = [i for i in ids if i != stop_id]
        told = portions(tokenizer, ids, params, stop_id)
        logprobs = ContentLogprobs(ReplyPlan(Formats(), ReplyWish(), ""), writer(tokenizer, params, stop_id))
        entries = []
        for part in told:
            logprobs.take(part)
            entries += logprobs.drain()
        text = "".join(part.text for part in told)
        if text.strip():
            check_bytes(tokenizer, b"".join(bytes(e["bytes"]) for e in entries), text)


def test_an_echoed_prompt(tokenizer: Tokenizer) -> None:
    params = SamplingParams(logprobs=1, output_kind=RequestOutputKind.DELTA)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        lists = writer(tokenizer, params).prompt(text, ids, [None] * len(ids))
        offsets = lists["text_offset"]
        assert offsets == sorted(offsets)
        assert all(0 <= offset <= len(text) for offset in offsets)


def test_parts_of_a_character_do_not_collide(tmp_path: Path) -> None:
    """As text all of them are U+FFFD, and an object has a key but once."""
    tokenizer = Tokenizer(save_folder(tmp_path, byte_level()))
    parts = [
        i for i in range(len(tokenizer)) if len(tokenizer.token_bytes(i)) == 1 and tokenizer.token_bytes(i) > b"\x7f"
    ]
    params = SamplingParams(logprobs=3, output_kind=RequestOutputKind.DELTA)
    answer = Answer(0, "", params, tokenizer, None)
    scores = TokenLogprobs([parts[0], *parts[:3]], [-1.0, -1.0, -2.0, -3.0], 1)
    answer.add(EngineOutput(request_id="", token_ids=parts[:1], logprobs=[scores], finish_reason="length"))
    lists = writer(tokenizer, params).completion(answer.take(delta=True), 1)
    assert len(lists["top_logprobs"][0]) == 3
    assert lists["tokens"][0] in lists["top_logprobs"][0]
    assert [read(token) for token in lists["top_logprobs"][0]] == [tokenizer.token_bytes(i) for i in parts[:3]]
