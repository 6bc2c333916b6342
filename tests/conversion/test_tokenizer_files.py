"""Folders without tokenizer.json, through the door that an engine takes: converted once, or refused by name."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from quire.config.files import tokenizer_files
from quire.config.files.tokenizer_files import tokenizer_folder
from quire.conversion.job import Job
from quire.conversion.tokenizers import convert
from quire.foundation.errors import ConfigError
from quire.frontend.tokenization.tokenizer import Tokenizer
from tests.conversion.test_sentencepiece import KINDS, train
from tests.conversion.vocabularies import MISTRALS, small_tekken, texts, write
from tests.frontend.tokenizers_for_tests import byte_level, save_folder


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """As Llama 2 came: a SentencePiece model, and what its config says."""
    (tmp_path / "tokenizer.model").write_bytes(train(**KINDS["bpe"]))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "auto_map": {"x": "y"}}
    return write(
        tmp_path, tokenizer_config={**config, "chat_template": "{{ messages }}"}, config={"model_type": "llama"}
    )


def here(folder: Path, kind: Any, file: str) -> Tokenizer:
    """Converted in this process; the other one is for the tests of the door."""
    made = convert(Job(str(folder), kind, file))
    assert not made.error, made.error
    out = folder / "made"
    out.mkdir()
    for name, text in made.files.items():
        (out / name).write_text(text, encoding="utf-8")
    return Tokenizer(out)


def test_the_second_start_converts_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tokenizer_folder(llama)
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("a b")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.decode(tokenizer.encode("Größe 🦙"), skip_special_tokens=True) == "Größe 🦙"
    assert "auto_map" not in json.loads((folder / "tokenizer_config.json").read_text())
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_files, "_ask", None)
        assert tokenizer_folder(llama) == folder
        assert tokenizer_folder(llama, "hf") == folder
    config = json.loads((llama / "tokenizer_config.json").read_text())
    write(llama, tokenizer_config={**config, "add_bos_token": False, "add_eos_token": True})
    other = Tokenizer(tokenizer_folder(llama))
    assert other.folder != folder
    assert other.encode("a b") == [*tokenizer.encode("a b")[1:], 2]
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted([folder.name, other.folder.name])


def test_modes(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    save_folder(llama, byte_level())
    for mode in ("auto", "hf"):
        assert tokenizer_folder(llama, mode) == llama
    slow = tokenizer_folder(llama, "slow")
    assert Tokenizer(slow).encode("the") != Tokenizer(llama).encode("the")
    with pytest.raises(ConfigError, match=r"tokenizer_mode=mistral reads tekken\.json"):
        tokenizer_folder(llama, "mistral")
    only = save_folder(tmp_path_factory.mktemp("only"), byte_level())
    with pytest.raises(ConfigError, match=r"tokenizer_mode=slow reads tokenizer\.model"):
        tokenizer_folder(only, "slow")


def test_tokens_that_only_configs_name(llama: Path) -> None:
    data = (llama / "tokenizer.model").read_bytes()
    size = Tokenizer(tokenizer_folder(llama)).vocab_size
    added = {
        "1": {"content": "<s>", "special": True},
        str(size - 1): {"content": "<|kept free|>", "special": True},
        str(size): {"content": "<plain>", "special": False, "normalized": False},
    }
    write(llama, tokenizer_config={"added_tokens_decoder": added}, added_tokens={"<more>": size + 1})
    write(llama, special_tokens_map={"pad_token": {"content": "<padding>"}})
    (llama / "tokenizer.model").write_bytes(data)
    tokenizer = here(llama, "sentencepiece", "tokenizer.model")
    names = ("<|kept free|>", "<plain>", "<more>", "<padding>")
    assert [tokenizer.convert_tokens_to_ids(name) for name in names] == [size - 1, size, size + 1, size + 2]
    assert tokenizer.encode("a<plain>b", add_special_tokens=False)[1] == size
    assert tokenizer.pad_token_id == size + 2
    assert size not in tokenizer.all_special_ids
    write(llama, added_tokens={"<more>": size + 7})
    made = convert(Job(str(llama), "sentencepiece", "tokenizer.model"))
    assert "gives '<more>' the id" in made.error


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "  the the\n\nend "},
]


@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_chats_are_those_of_mistral_common(name: str, tmp_path: Path) -> None:
    file = small_tekken(name, tmp_path)
    tokenizer = here(tmp_path, "tekken", "tekken.json")
    expected = MistralTokenizer.from_file(str(file)).encode_chat_completion(
        ChatCompletionRequest(messages=CONVERSATION)  # type: ignore[arg-type]
    )
    assert tokenizer.apply_chat_template(CONVERSATION) == expected.tokens
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 1


def test_chats_of_mistrals_sentencepiece_models(tmp_path: Path) -> None:
    name = "tokenizer.model.v3"
    shutil.copy(MISTRALS / "mistral_instruct_tokenizer_240323.model.v3", tmp_path / name)
    tokenizer = here(tmp_path, "mistral", name)
    reference = MistralTokenizer.from_file(str(tmp_path / name))
    messages = [{**message, "content": message["content"].strip()} for message in CONVERSATION]
    expected = reference.encode_chat_completion(ChatCompletionRequest(messages=messages))  # type: ignore[arg-type]
    assert tokenizer.apply_chat_template(messages) == expected.tokens


def test_mistrals_files_are_found(tmp_path: Path) -> None:
    small_tekken("tekken_240911.json", tmp_path, 1400)
    tokenizer = Tokenizer(tokenizer_folder(tmp_path, "mistral"))
    assert tokenizer_folder(tmp_path) == tokenizer.folder
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    assert tokenizer.chat_template is not None
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist, nor any other"):
        Tokenizer(tokenizer_folder(tmp_path, "hf"))


def test_what_transformers_knows(tmp_path: Path) -> None:
    """Byte-level BPE and WordPiece: vocabularies that do not say how texts are split."""
    gpt2, bert = tmp_path / "gpt2", tmp_path / "bert"
    for folder in (gpt2, bert):
        folder.mkdir()
    model = json.loads(byte_level().to_str())["model"]
    write(gpt2, vocab=model["vocab"], config={"model_type": "gpt2"})
    write(gpt2, tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "bos_token": "<|end|>"})
    (gpt2 / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "##s", "hello", "the", "##e"]
    (bert / "vocab.txt").write_text("\n".join(words))
    write(bert, config={"model_type": "bert"}, tokenizer_config={"do_lower_case": True})
    for folder, file in ((gpt2, "vocab.json"), (bert, "vocab.txt")):
        reference = transformers.AutoTokenizer.from_pretrained(folder)
        ours = here(folder, "transformers", file)
        for text in ("Hello the hellos", "the  end\n\nof it", "", *texts(5)):
            assert ours.encode(text) == reference(text).input_ids
        assert ours.eos_token == reference.eos_token
        assert ours.convert_tokens_to_ids(reference.unk_token) == reference.unk_token_id

    write(bert, config={"model_type": "nobodys"})
    (bert / "tokenizer_config.json").unlink()
    assert "makes no tokenizer of it" in convert(Job(str(bert), "transformers", "vocab.txt")).error


def test_a_missing_package_is_named(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "transformers.py").write_text("raise ImportError('no transformers here')")
    monkeypatch.setattr(sys, "path", [str(hidden), *sys.path])
    (tmp_path / "vocab.txt").write_text("[UNK]\na")
    with pytest.raises(ConfigError, match=r"no transformers here.*pip install 'quire\[tokenizers\]'"):
        tokenizer_folder(tmp_path)


def test_without_mistral_common_there_is_no_template(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "mistral_common.py").write_text("raise ImportError('gone')")
    monkeypatch.setattr(sys, "path", [str(hidden), *sys.path])
    small_tekken("tekken_240911.json", tmp_path, 1300)
    assert Tokenizer(tokenizer_folder(tmp_path)).chat_template is None
    assert "pip install 'quire[mistral]'" in caplog.text


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer.model": b"nonsense"}, "tokenizer.model: tokenizer.model cannot be read"),
        ({"tokenizer.model": b"YQ== 0\nYg== 1\n"}, "does not say how texts are split"),
        ({"tekken.json": b"{}"}, "not of Mistral's form"),
    ],
)
def test_what_cannot_be_converted(files: dict[str, bytes], words: str, tmp_path: Path) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        tokenizer_folder(tmp_path)


def test_unknown_classes_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "x.tiktoken").write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(bytes([n])), n) for n in range(256)))
    write(tmp_path, tokenizer_config={"tokenizer_class": "NobodysTokenizer"})
    made = convert(Job(str(tmp_path), "tiktoken", "x.tiktoken"))
    assert "'NobodysTokenizer' is not known" in made.error
    write(tmp_path, tokenizer_config={"tokenizer_class": "QWenTokenizer"})
    assert here(tmp_path, "tiktoken", "x.tiktoken").encode("hi<|im_end|>") == [104, 105, 258]


def test_a_cache_that_cannot_be_written(llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(file))
    with pytest.raises(ConfigError, match="set QUIRE_CACHE_DIR"):
        tokenizer_folder(llama)


def test_the_fork_reaches_no_network_and_runs_nothing() -> None:
    from quire.conversion.no_network import close_the_network

    if (child := os.fork()) == 0:
        import socket
        import subprocess

        close_the_network()
        refused = 0
        for call in (lambda: socket.create_connection(("127.0.0.1", 9)), lambda: subprocess.run(["true"], check=True)):
            try:
                call()
            except PermissionError:
                refused += 1
        os._exit(refused)
    _, status = os.waitpid(child, 0)  # and no other that has ended
    assert os.waitstatus_to_exitcode(status) == 2
