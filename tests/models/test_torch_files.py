"""Checkpoints of torch's own form: read by flag, by places in the file, and nothing in them is run."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire.config.model_info import read_model_info
from quire.conversion.torch_file import listing
from quire.foundation.errors import WeightsError
from quire.models import catalog, weights
from quire.models.base import DecoderStack
from quire.models.safetensors_file import MalformedFileError
from quire.models.torch_files import TorchFiles
from tests.models import checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(checkpoints.make("Llama", num_hidden_layers=2), tmp_path_factory.mktemp("saved"))


def pickled(saved: Path, folder: Path, state: Any = None, name: str = "pytorch_model.bin") -> Path:
    (folder / "config.json").write_bytes((saved / "config.json").read_bytes())
    torch.save(load_file(saved / "model.safetensors") if state is None else state, folder / name)
    return folder


def load(folder: Path, load_format: str = "pt") -> DecoderStack:
    info = read_model_info(folder, {})
    model = catalog.build(info, torch.float32, checkpoints.CPU, info.max_position)
    weights.load(model, folder, load_format)
    return model


def same(one: DecoderStack, other: DecoderStack) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are listed in this process; the other one takes seconds to start, and has a test of its own."""
    monkeypatch.setattr(TorchFiles, "__enter__", lambda files: files)
    monkeypatch.setattr(TorchFiles, "_ask", lambda _, path: listing(str(path)))


@pytest.mark.usefixtures("_here")
def test_single_and_sharded(saved: Path, tmp_path: Path) -> None:
    expected = load(saved, "auto")
    assert same(load(pickled(saved, tmp_path)), expected)
    state = load_file(saved / "model.safetensors")
    names = sorted(state)
    (tmp_path / "pytorch_model.bin").unlink()
    parts = {"pytorch_model-1.bin": names[:5], "pytorch_model-2.bin": names[5:]}
    for file, keys in parts.items():
        torch.save({key: state[key] for key in keys}, tmp_path / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert same(load(tmp_path), expected)
    (tmp_path / "pytorch_model-2.bin").unlink()
    with pytest.raises(WeightsError, match=r"pytorch_model-2\.bin, which the index points to"):
        load(tmp_path)


def test_auto_names_the_flag(saved: Path, tmp_path: Path) -> None:
    pickled(saved, tmp_path)
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is one of torch's own form: load_format=pt reads it"):
        load(tmp_path, "auto")
    with pytest.raises(WeightsError, match=r"load_format=auto reads the \.safetensors"):
        load(saved, "pt")


class Program:
    """What a pickle may hold."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def test_a_pickle_that_is_a_program_is_refused_and_not_run(saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    state = {**load_file(saved / "model.safetensors"), "more": Program(mark)}
    pickled(saved, tmp_path, state)
    torch.save(load_file(saved / "model.safetensors"), tmp_path / "fine.bin")
    with TorchFiles() as files:
        with pytest.raises(MalformedFileError, match=r"cannot be read: UnpicklingError: .*system"):
            files.open(tmp_path / "pytorch_model.bin")
        with files.open(tmp_path / "fine.bin") as file:  # which is no worse off for it
            assert file.entries.keys() == load_file(saved / "model.safetensors").keys()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Program(mark)))
    assert "cannot be read" in listing(str(tmp_path / "pytorch_model.bin")).error
    assert not mark.exists()


def test_what_is_in_a_file(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    file = tmp_path / "x.bin"
    torch.save({"state_dict": {"a": base, "part": base[2:], "half": base.half(), "scalar": torch.tensor(7)}}, file)
    found = listing(str(file))
    assert {name: (p.dtype, p.shape) for name, p in found.tensors.items()} == {
        "a": ("float32", [4, 6]), "part": ("float32", [2, 6]), "half": ("float16", [4, 6]), "scalar": ("int64", []),
    }  # fmt: skip
    data = file.read_bytes()
    for name, expected in (("a", base), ("part", base[2:])):
        start = found.tensors[name].start
        assert data[start : start + 4 * expected.numel()] == expected.contiguous().numpy().tobytes()
    assert "FileNotFoundError" in listing(str(tmp_path / "gone.bin")).error
    for state, words in (([base], "holds a list"), ({"a": base.t()}, "view of another"), ({"a": 3}, "no tensor")):
        torch.save(state, file)
        assert words in listing(str(file)).error
    torch.save({"a": base}, file, _use_new_zipfile_serialization=False)
    assert "cannot be read" in listing(str(file)).error


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_files_that_are_cut_off(keep: float, saved: Path, tmp_path: Path) -> None:
    pickled(saved, tmp_path)
    data = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin cannot be read"):
        load(tmp_path)
