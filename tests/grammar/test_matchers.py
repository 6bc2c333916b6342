"""The contract of matchers: what was taken can be taken back, forks go their own way, ends are where they belong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.foundation.errors import ConfigError
from quire.grammar.vocabulary import Vocabulary
from quire.types.structured import GRAMMAR_BACKENDS, GrammarSpec
from tests.frontend.tokenizers_for_tests import byte_fallback, byte_level, word_level
from tests.grammar.walk import DEMO_MODEL, allowed, answer, demo

SPECS = [
    GrammarSpec("json_schema", '{"type":"object","properties":{"a":{"type":"number"},"b":{"type":"string"}}}'),
    GrammarSpec("regex", "[a-f]+(x|yz)?"),
    GrammarSpec("choice", '["one","two","three"]'),
]


@pytest.mark.parametrize("name", list(GRAMMAR_BACKENDS))
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_rollback_and_fork(spec: GrammarSpec, name: str) -> None:
    backend, rng = demo(name), random.Random(0)
    matcher = backend.compile(spec).matcher()
    masks, taken = [], []
    for _ in range(25):
        masks.append(allowed(backend, matcher))
        if matcher.is_done:
            break
        token = rng.choice(masks[-1])
        assert matcher.accept(token)
        taken.append(token)
        other = matcher.fork()
        if not other.is_done:
            assert other.accept(allowed(backend, other)[0])
        if token in backend.vocabulary.stop_ids:
            assert matcher.is_done
            break
    count = rng.randrange(1, len(taken) + 1)
    matcher.rollback(count)
    assert allowed(backend, matcher) == masks[len(taken) - count]
    for token in taken[len(taken) - count :]:
        assert matcher.accept(token)


@pytest.mark.parametrize("name", list(GRAMMAR_BACKENDS))
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_what_the_mask_forbids_is_not_taken_and_changes_nothing(spec: GrammarSpec, name: str) -> None:
    backend, rng = demo(name), random.Random(1)
    matcher = backend.compile(spec).matcher()
    for _ in range(8):
        mask = allowed(backend, matcher)
        forbidden = [i for i in rng.sample(range(4096), 60) if i not in mask]
        # A text that can only go on in one way is masked to its usual tokens; others with this spelling do no harm.
        if len(mask) > 1:
            assert not any(matcher.accept(i) for i in forbidden)
            assert allowed(backend, matcher) == mask
        assert matcher.accept(rng.choice([i for i in mask if i not in (0, 2)] or mask))
        if matcher.is_done:
            return


@pytest.mark.parametrize("name", list(GRAMMAR_BACKENDS))
def test_stop_tokens_are_allowed_exactly_where_the_grammar_may_end(name: str) -> None:
    backend = demo(name)
    matcher = backend.compile(GrammarSpec("regex", "aa?")).matcher()
    a = backend.vocabulary.tokens.index(b"a")
    assert not matcher.may_end
    assert not matcher.accept(2)
    assert 2 not in allowed(backend, matcher)
    assert matcher.accept(a)
    assert matcher.may_end
    assert not matcher.is_done
    assert {0, 2, a} == set(allowed(backend, matcher))
    assert matcher.accept(2)
    assert matcher.is_done
    assert not matcher.accept(2)
    assert not matcher.accept(a)
    assert allowed(backend, matcher) == [0, 2]
    matcher.rollback(1)
    assert matcher.accept(a)
    assert matcher.is_done
    assert allowed(backend, matcher) == [0, 2]


@pytest.mark.parametrize("name", list(GRAMMAR_BACKENDS))
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_other_vocabularies(make: object, name: str, tmp_path: Path) -> None:
    tokenizer = make()  # type: ignore[operator]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size() + 70  # a model's logits are padded
    backend = GRAMMAR_BACKENDS.get(name)(Vocabulary(tmp_path, size, [1]))
    rng = random.Random(0)
    for spec in SPECS:
        for _ in range(5):
            matcher = backend.compile(spec).matcher()
            text, _ = answer(backend, matcher, rng, 40, close_at_limit=True)
            assert max(allowed(backend, matcher), default=0) < size - 70
            if spec.kind == "choice":
                assert text in (b"one", b"two", b"three")
    matcher = backend.compile(GrammarSpec("choice", '["größer 日本"]')).matcher()
    assert answer(backend, matcher, rng, 60) == ("größer 日本".encode(), True)


def test_a_vocabulary_that_cannot_be_spelled_is_refused(tmp_path: Path) -> None:
    word_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="byte-level or SentencePiece"):
        Vocabulary(tmp_path, 500, [0])


def test_the_demo_vocabulary() -> None:
    vocabulary = Vocabulary(DEMO_MODEL, 4096, [2, 0, 9999])
    assert vocabulary.stop_ids == [0, 2]
    assert vocabulary.tokens[2] == b""
    assert b"".join(vocabulary.tokens[i] for i in vocabulary.encode("größer <|im_end|>")) in (
        b"",
        "größer <|im_end|>".encode(),
    )
    assert b"".join(vocabulary.tokens[i] for i in vocabulary.encode('{"a": 1}')) == b'{"a": 1}'
