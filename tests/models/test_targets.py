"""Where parts of a checkpoint's tensors go: any dimension, any rank's share, matrices that are packed when whole."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.model_info import read_model_info
from quire.distributed.topology import Topology
from quire.foundation.errors import ConfigError, WeightsError
from quire.layers.linear import Linear
from quire.layers.targets import Staged, Staging, Target
from quire.models import catalog, weights
from quire.models.safetensors_file import SafetensorsFile
from quire.models.transfer import Read, transfer
from quire.quantization.base import (
    FORMATS,
    INPUTS,
    OUTPUTS,
    Axis,
    MatrixInfo,
    QuantizationMethod,
    Scheme,
    Source,
    Spec,
    Tensors,
)
from quire.quantization.plain import Unquantized
from tests.models import checkpoints

CPU = torch.device("cpu")


def read(folder: Path, tensors: dict[str, torch.Tensor], targets: list[Target]) -> int:
    """Through a file; returns the bytes read."""
    save_file(tensors, folder / "a.safetensors")
    with SafetensorsFile(folder / "a.safetensors") as file:
        return sum(transfer([Read(file, file.entries[target.source], target) for target in targets], CPU))


SLICES: list[tuple[tuple[int, ...], tuple[slice, ...]]] = [
    ((12, 10), ()),
    ((12, 10), (slice(3, 9),)),
    ((12, 10), (slice(None), slice(2, 7))),
    ((12, 10), (slice(4, 12), slice(5, 10))),
    ((5, 6, 7), (slice(1, 4),)),
    ((5, 6, 7), (slice(None), slice(2, 6))),
    ((5, 6, 7), (slice(2, 4), slice(3, 6), slice(1, 5))),
    ((40,), (slice(7, 31),)),
    ((), ()),
]


@pytest.mark.parametrize("chunk", [64, 200, 1 << 20])
@pytest.mark.parametrize(("shape", "part"), SLICES, ids=str)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
def test_a_part_in_any_dimension_into_a_part(
    shape: tuple[int, ...],
    part: tuple[slice, ...],
    kept: torch.dtype,
    chunk: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.models.transfer.CHUNK_BYTES", chunk)
    stored = torch.randn(shape)
    wanted = stored[part]
    into = torch.zeros([length + 3 for length in wanted.shape], dtype=kept)
    at = tuple(slice(1, length + 1) for length in wanted.shape)
    read(tmp_path, {"a": stored}, [Target("a", shape, into, part=part, at=at)])
    expected = torch.zeros_like(into)
    expected[at] = wanted.to(kept)
    assert torch.equal(into, expected)


def test_one_tensor_into_two_places_and_many_into_one(tmp_path: Path) -> None:
    """Experts: stored together or each by itself, they end up in the same three dimensions."""
    together, single = torch.randn(2, 6, 4), torch.randn(3, 4)
    up, gate = torch.empty(3, 3, 4), torch.empty(3, 3, 4)
    targets = [
        Target("all", (2, 6, 4), gate, part=(slice(None), slice(0, 3)), at=(slice(0, 2),)),
        Target("all", (2, 6, 4), up, part=(slice(None), slice(3, 6)), at=(slice(0, 2),)),
        Target("last.gate", (3, 4), gate, at=(2,)),
        Target("last.up", (3, 4), up, at=(2,)),
    ]
    read(tmp_path, {"all": together, "last.gate": single, "last.up": -single}, targets)
    assert torch.equal(gate, torch.cat([together[:, :3], single[None]]))
    assert torch.equal(up, torch.cat([together[:, 3:], -single[None]]))


def test_integers_arrive_as_they_are(tmp_path: Path) -> None:
    stored = torch.randint(-(2**31), 2**31 - 1, (9, 6), dtype=torch.int32)
    into = torch.empty(9, 3, dtype=torch.int32)
    read(tmp_path, {"a": stored}, [Target("a", (9, 6), into, (torch.int32,), part=(slice(None), slice(3, 6)))])
    assert torch.equal(into, stored[:, 3:])


# -- ranks ------------------------------------------------------------------------------------------------------


def layer(role: Any, topology: Topology, parts: dict[str, int] | None = None, method: Any = None) -> Linear:
    linear = Linear(8, sum(parts.values()) if parts else 12, bias=True, role=role, parts=parts)
    linear.allocate(method or Unquantized(), tuple(parts or ("m",)), topology)
    return linear


@pytest.mark.parametrize(("role", "dimension"), [("rows", 0), ("vocabulary", 0), ("columns", 1)])
def test_ranks_have_their_shares(role: str, dimension: int, tmp_path: Path) -> None:
    tensors = {"m.weight": torch.randn(12, 8), "m.bias": torch.randn(12)}
    shares = []
    for rank in range(2):
        linear = layer(role, Topology(rank, 2))
        read(tmp_path, tensors, list(linear.targets()))
        shares.append(linear)
    weights = torch.cat([linear.get_parameter("weight") for linear in shares], dim=dimension)
    assert torch.equal(weights, tensors["m.weight"])
    biases = [linear.get_parameter("bias") for linear in shares]
    assert torch.equal(torch.cat(biases) if dimension == 0 else biases[1], tensors["m.bias"])
    assert [linear.local_shape for linear in shares] == [(6, 8) if dimension == 0 else (12, 4)] * 2


def test_each_part_of_a_stack_is_shared(tmp_path: Path) -> None:
    parts = {"q": 8, "k": 2, "v": 2}
    tensors = {f"{name}.weight": torch.randn(rows, 8) for name, rows in parts.items()}
    tensors |= {f"{name}.bias": torch.randn(rows) for name, rows in parts.items()}
    for rank in range(2):
        linear = layer("rows", Topology(rank, 2), parts)
        read(tmp_path, tensors, list(linear.targets()))
        mine = [tensors[f"{name}.weight"].chunk(2)[rank] for name in parts]
        assert torch.equal(linear.get_parameter("weight"), torch.cat(mine))


def test_what_ranks_cannot_share_is_said() -> None:
    with pytest.raises(ConfigError, match="input columns must be a multiple of tensor_parallel_size=3, got 8"):
        layer("columns", Topology(0, 3))


# -- methods ----------------------------------------------------------------------------------------------------


class Nibbles(QuantizationMethod):
    """A made-up convention: four numbers of a column in one int32, transposed; a scale a row; one number a module."""

    def scheme(self, info: MatrixInfo) -> Scheme:  # noqa: ARG002 (the same for all)
        sources = (
            Source("packed", (INPUTS, Axis("outputs", 4)), (torch.int32,), torch.int32),
            Source("scale", (OUTPUTS, 1), (torch.float32,), torch.float32),
            Source("factor", (), (torch.float32,), torch.float32),
        )
        return Scheme(FORMATS.get("plain")(), sources, self.pack)

    @staticmethod
    def pack(read: Tensors) -> Tensors:
        packed, scale, factor = read["packed"], read["scale"], read["factor"]
        numbers = torch.stack([(packed >> shift & 255) - 128 for shift in (0, 8, 16, 24)], dim=-1)
        whole = numbers.flatten(1).T.float() * scale
        rows = [part * one for part, one in zip(whole.chunk(max(factor.numel(), 1)), factor.view(-1), strict=True)]
        return {"weight": torch.cat(rows)}


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """[rows, columns] of -128 … 127 → int32 [columns, rows / 4]."""
    parts = (numbers.T + 128).view(numbers.shape[1], -1, 4).long()
    both = sum(parts[..., i] << (8 * i) for i in range(4))
    assert isinstance(both, torch.Tensor)
    return torch.where(both >= 2**31, both - 2**32, both).int().contiguous()


@pytest.mark.parametrize("chunk", [16, 1 << 20])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_convention_with_other_tensors(
    rank: int | None, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.models.transfer.CHUNK_BYTES", chunk)
    parts = {"gate": 16, "up": 16}
    numbers = {name: torch.randint(-128, 128, (rows, 8)) for name, rows in parts.items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, factor in zip(parts, (2.0, 4.0), strict=True):
        tensors |= {
            f"{name}.packed": packed(numbers[name]), f"{name}.scale": torch.rand(16, 1),
            f"{name}.factor": torch.tensor(factor), f"{name}.bias": torch.randn(16),
        }  # fmt: skip
    linear = layer("rows", Topology() if rank is None else Topology(rank, 2), parts, Nibbles())
    read(tmp_path, tensors, list(linear.targets()))
    dense = [numbers[n] * tensors[f"{n}.scale"] * tensors[f"{n}.factor"] for n in parts]
    mine = dense if rank is None else [part.chunk(2)[rank] for part in dense]
    assert torch.equal(linear.get_parameter("weight"), torch.cat(mine))


def test_numbers_stored_together_cannot_be_cut_apart() -> None:
    parts = {"gate": 4, "up": 4}
    with pytest.raises(ConfigError, match="outputs are stored 4 together and cannot be cut at 2"):
        list(layer("rows", Topology(1, 2), parts, Nibbles()).targets())


def test_a_matrix_is_packed_once_when_all_of_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By many threads, in pieces, each matrix's memory held until then and not longer."""
    monkeypatch.setattr("quire.models.transfer.CHUNK_BYTES", 256)
    names = [f"layer{i}" for i in range(20)]
    tensors = {name: torch.randn(64, 16) for name in names}
    packed_by: list[str] = []
    lock = threading.Lock()
    targets, kept = [], {}
    for name in names:
        kept[name] = torch.empty(64, 16)

        def pack(tensors: Tensors, name: str = name) -> Tensors:
            with lock:
                packed_by.append(name)
            return {"weight": tensors["weight"] * 2}

        staging = Staging({"weight": Spec((64, 16), torch.float32)}, CPU, pack, {"weight": kept[name]})
        targets.append(Target(name, (64, 16), Staged(staging, "weight")))
    read(tmp_path, tensors, targets)
    assert sorted(packed_by) == sorted(names)
    assert all(torch.equal(kept[name], tensors[name] * 2) for name in names)
    assert not any(target.into.staging._tensors for target in targets if isinstance(target.into, Staged))


class Experts(torch.nn.Module):
    """A layer of somebody's own: three dimensions, of tensors that come by twos."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.empty(3, 8, 4), requires_grad=False)

    def targets(self) -> list[Target]:
        halves = {"gate": slice(0, 4), "up": slice(4, 8)}
        return [
            Target(f"model.experts.{number}.{name}", (4, 4), self.gate_up.data, at=(number, rows))
            for number in range(3)
            for name, rows in halves.items()
        ]


def test_a_layer_may_say_itself_where_its_numbers_come_from(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("Llama"), tmp_path)
    state = load_file(folder / "model.safetensors")
    own = {f"model.experts.{number}.{name}": torch.randn(4, 4) for number in range(3) for name in ("gate", "up")}
    save_file({**state, **own}, folder / "model.safetensors")
    model = catalog.build(read_model_info(folder, {}), torch.float32, CPU, 64)
    model.experts = Experts()
    weights.load(model, folder, "auto")
    stacked = [torch.cat([own[f"model.experts.{number}.{name}"] for name in ("gate", "up")]) for number in range(3)]
    assert torch.equal(model.experts.gate_up, torch.stack(stacked))
    del own["model.experts.1.up"]
    save_file({**state, **own}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.experts\.1\.up \[4, 4\]"):
        weights.load(model, folder, "auto")
