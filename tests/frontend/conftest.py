from __future__ import annotations

from pathlib import Path

import pytest

from quire.frontend.tokenization.tokenizer import Tokenizer
from tests.frontend.tokenizers_for_tests import byte_fallback, byte_level, save_folder

CHATML = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("byte_level"), byte_level(), eos_token="<|end|>", chat_template=CHATML)


@pytest.fixture(scope="session")
def tokenizer(byte_level_folder: Path) -> Tokenizer:
    """Byte-level BPE; EOS is <|end|>, id 0."""
    return Tokenizer(byte_level_folder)


@pytest.fixture(scope="session")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SentencePiece-like BPE that puts <s> in front."""
    folder = save_folder(
        tmp_path_factory.mktemp("byte_fallback"), byte_fallback(), bos_token="<s>", eos_token={"content": "</s>"}
    )
    return Tokenizer(folder)
