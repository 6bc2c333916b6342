"""How the numbers of a matrix are kept (a weight format), and how checkpoints bring them (a quantization method).

Formats are few and methods many: a method says for each matrix which format it has, which tensors of the checkpoint it
is made of, and how these become the format's own tensors. Kernels know formats only, layers know neither: a `Linear`
has a `Matrix`, which multiplies.

A new format implements `WeightFormat` and a `Matrix` whose `dense` says what its numbers stand for; that alone is
correct everywhere, since what a matrix has no kernel for is done with its dense numbers, one step after another. A new
method implements `QuantizationMethod`. Both are named in their registries, by entry points for installed packages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from quire.foundation.errors import ConfigError
from quire.foundation.registry import Registry
from quire.kernels.attention.rope import qk_norm_rope_write
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm.fp8_linear import Fp8Rows
from quire.kernels.gemm.linear import linear
from quire.kernels.moe.experts import add_each
from quire.kernels.moe.inside import USUAL, Inside, Shared
from quire.kernels.moe.routes import Routes
from quire.kernels.summands import Summands

if TYPE_CHECKING:
    from quire.kernels.attention.rope import QkvTarget

Norm = tuple[torch.Tensor, float]
"""Weight [k] and eps of an RMS norm."""
Rows = torch.Tensor | Fp8Rows
"""What is multiplied, [m, k]: in the dtype of activations, or 8 bits and a scale a row."""
Tensors = Mapping[str, torch.Tensor]
Role = Literal["rows", "columns", "vocabulary", "none"]
"""How ranks share a matrix: by output rows (q, k, v, gate, up), by input columns, so that each rank's product is a part
of a sum (o, down), by rows of the vocabulary (embedding, head), or not at all."""

Pack = Callable[[Tensors], Tensors]

ALL_ROWS = slice(None)
FORMATS = Registry(
    "weight format",
    {
        "plain": "quire.quantization.plain:Plain",
        "fp8": "quire.quantization.fp8:Fp8Channel",
        "fp8_block": "quire.quantization.grouped:Fp8Block",
        "int8": "quire.quantization.grouped:Int8",
        "int4": "quire.quantization.grouped:Int4",
        "mxfp4": "quire.quantization.grouped:MXFP4",
        "nvfp4": "quire.quantization.grouped:NVFP4",
        "nf4": "quire.quantization.grouped:NF4",
        "int8_rows": "quire.quantization.int8_rows:Int8Rows",
    },
    contract="quire.quantization.base:WeightFormat",
    needs=("tensors", "pack", "matrix", "refuses"),
    is_class=True,
)


class Spec(NamedTuple):
    """Of a tensor that a format keeps."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Matrix(ABC):
    """One matrix [n, k] in a format, and its bias [n]: what a product needs.

    The tensors are a layer's parameters. They are written before the first product only: kernels read them ahead of the
    end of those before them.
    """

    bias: torch.Tensor | None
    takes_fp8_rows = False

    @abstractmethod
    def dense(self, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        """What the numbers stand for.

        Args:
            dtype: that they are rounded to.
            rows: some of them.

        Shapes:
            Returns [n, k], or [rows, k].
        """

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """[n, k] in floating point, and float32 scales of its lines if there are any, of a matrix that is kept so and
        has no bias; None: it is another."""
        return None

    def linear(
        self,
        x: Rows,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        reader: Matrix | None = None,  # noqa: ARG002 (for those who can)
    ) -> Rows:
        """x [m, k] → [m, n], with what stands around the product; see `quire.kernels.gemm.linear`.

        reader: the one matrix that the result is multiplied by: it may get its rows in 8 bits if it takes them.
        """
        if isinstance(x, Fp8Rows):
            raise TypeError("this matrix takes no rows of 8 bits")
        return linear(
            x, self.dense(x.dtype), self.bias,
            norm=norm, gated=gated, residual=residual, out_dtype=out_dtype, out=out,
        )  # fmt: skip

    def summands(self, x: Rows, norm: Norm | None) -> Summands | None:  # noqa: ARG002 (for those who can)
        """`linear` as what a sum over ranks adds up on its way, where that is faster; None: it is not."""
        return None

    def qkv_rope_write(self, x: torch.Tensor, norm: Norm | None, place: QkvTarget) -> torch.Tensor:
        """x [tokens, k] → rotated q [tokens, num_heads, head_dim]; k and v go to the cache.

        See `quire.kernels.attention.qkv`.
        """
        qkv = self.linear(x, norm=norm)
        assert isinstance(qkv, torch.Tensor)
        return qk_norm_rope_write(qkv, *place)


class ExpertMatrices(ABC):
    """What a mixture of experts multiplies by: gate and up of each expert [2n, k], and down [k, n]."""

    takes_narrow = False  # whether many rows are multiplied in 8 bits

    @abstractmethod
    def add(
        self,
        x: torch.Tensor,
        routes: Routes,
        residual: torch.Tensor | None,
        norm: Norm | None = None,
        inside: Inside = USUAL,
        narrow: Fp8Rows | None = None,
    ) -> torch.Tensor:
        """`residual += Σ weight · down(silu(gate(x)) · up(x))` over each token's experts, in place; returns it. Without
        a residual, that sum alone.

        norm: what x, which may be the residual, goes through first. inside: the experts' gate and biases. narrow: what
        `takes_narrow` asks for, if it is at hand: x behind its norm.

        Shapes:
            x, residual [tokens, k], of one dtype.
        """

    def summands(
        self,
        x: torch.Tensor,
        routes: Routes,
        norm: Norm | None = None,
        inside: Inside = USUAL,
        narrow: Fp8Rows | None = None,
    ) -> torch.Tensor | Summands:
        """`add` without a residual, for who adds it up anyway: the sum, or what it is to be of."""
        return self.add(x, routes, None, norm, inside, narrow)

    def beside(self, gate_up: Matrix, down: Matrix, gate: torch.Tensor | None) -> Shared | None:  # noqa: ARG002
        """Shared experts' matrices as `add_with` takes them; None: it does not. gate: see `Shared`."""
        return None

    def add_with(
        self, shared: Shared, x: torch.Tensor, routes: Routes, residual: torch.Tensor | None, norm: Norm | None
    ) -> torch.Tensor:
        """`add`, of `beside` as well, for so few tokens that kernels take them along; with the usual gate alone."""
        raise NotImplementedError


class EachExpert(ExpertMatrices):
    """Any format: the experts that are hit come one after another, with their dense numbers. It waits for the device
    to know which, and so is not for graphs."""

    def __init__(self, gate_up: tuple[WeightFormat, Tensors], down: tuple[WeightFormat, Tensors]) -> None:
        self._gate_up, self._down = gate_up, down

    def add(
        self,
        x: torch.Tensor,
        routes: Routes,
        residual: torch.Tensor | None,
        norm: Norm | None = None,
        inside: Inside = USUAL,
        narrow: Fp8Rows | None = None,  # noqa: ARG002 (for kernels)
    ) -> torch.Tensor:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ConfigError("experts in this format are multiplied one by one, without graphs: set enforce_eager")
        x = x if norm is None else rms_norm(x, *norm)

        def dense(kept: tuple[WeightFormat, Tensors], expert: int) -> torch.Tensor:
            form, tensors = kept
            return form.matrix({name: tensor[expert] for name, tensor in tensors.items()}, None).dense(x.dtype)

        return add_each(x, routes, lambda e: dense(self._gate_up, e), lambda e: dense(self._down, e), residual, inside)


class WeightFormat(ABC):
    """How the numbers of one matrix are kept and multiplied."""

    @abstractmethod
    def tensors(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Spec]:
        """What is kept of a matrix [rows, columns], by the names its parameters have. dtype: of the activations."""

    @abstractmethod
    def pack(self, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        """dense [rows, columns], of any float type → `tensors`, on its device: the nearest that the format holds."""

    @abstractmethod
    def matrix(self, tensors: Tensors, bias: torch.Tensor | None) -> Matrix:
        """tensors: as `tensors` says."""

    def experts(self, gate_up: Tensors, down: Tensors, down_format: WeightFormat | None = None) -> ExpertMatrices:
        """Of many experts: of each tensor as many as there are experts, along a first dimension of its own.

        Args:
            gate_up: in this format.
            down: in `down_format`.
            down_format: None, the same.
        """
        return EachExpert((self, gate_up), (down_format or self, down))

    def scale_rows(self, tensors: Tensors, powers: torch.Tensor) -> None:  # noqa: ARG002 (for those who can)
        """Multiply each row by a power of two, in place: no number is rounded by that.

        Args:
            tensors: as `tensors` says.
            powers: float32 [rows].

        Raises:
            ConfigError: the format has no room for it.
        """
        raise ConfigError(f"{type(self).__name__} weights have no scales of rows", "kv_cache_dtype")

    def refuses(self, device: torch.device, dtype: torch.dtype) -> str | None:  # noqa: ARG002 (for those who do)
        """Why such matrices cannot be multiplied there; None: they can. dtype: of the activations."""
        return None


@dataclass(frozen=True, slots=True)
class Axis:
    """What a dimension of a stored tensor counts: outputs or inputs of the matrix, `per` of them in `takes` places."""

    of: Literal["outputs", "inputs"]
    per: int = 1
    takes: int = 1

    def count(self, length: int) -> int:
        """Places that `length` of them take."""
        return -(-length // self.per) * self.takes

    def places(self, begin: int, end: int) -> slice:
        """Where those from begin to end lie.

        Raises:
            ConfigError: begin is inside a place.
        """
        if begin % self.per:
            raise ConfigError(f"{self.of} are stored {self.per} together and cannot be cut at {begin}", "quantization")
        return slice(begin // self.per * self.takes, self.count(end))


OUTPUTS, INPUTS = Axis("outputs"), Axis("inputs")


@dataclass(frozen=True, slots=True)
class Source:
    """One of the tensors that a checkpoint has for a module. name: behind the module's.

    axes: its dimensions; an integer is the length of one that counts neither. Tensors of modules that are stacked to
    one matrix (q, k, v) are stacked along their outputs; those without, along a new first dimension.
    kept: the dtype it is read into. default: what it is where the checkpoint has none; None: it must have it.
    is_ragged: of one dimension, it may be shorter, and zeros follow then.
    part: of one module alone, by its number, where they are stored unlike; None: of all.
    """

    name: str
    axes: tuple[Axis | int, ...]
    dtypes: tuple[torch.dtype, ...]
    kept: torch.dtype
    default: float | None = None
    is_ragged: bool = False
    part: int | None = None

    @property
    def key(self) -> str:
        """What `Scheme.pack` gets it by."""
        return self.name if self.part is None else f"{self.part}.{self.name}"

    @property
    def has_outputs(self) -> bool:
        return any(isinstance(axis, Axis) and axis.of == "outputs" for axis in self.axes)


@dataclass(frozen=True, slots=True)
class MatrixInfo:
    """What a method may judge a matrix by. modules: the checkpoint's, whose rows are stacked to make it.

    parts: how many rows of each module this rank has. Rows and columns are those of all ranks. spelled: what files may
    call a module besides, as their settings name it.

    For methods that read modules whole: whole: how many rows each module has; a module that holds several parts is
    there once for each. pieces: runs [begin, end) of them that are the part, in its order. own, inputs: of the part's
    rows, and of the columns, the lines [begin, end) that this rank has.
    """

    modules: tuple[str, ...]
    rows: int
    columns: int
    role: Role
    dtype: torch.dtype  # of the activations
    parts: tuple[int, ...] = ()
    spelled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    whole: tuple[int, ...] = ()
    pieces: tuple[tuple[tuple[int, int], ...], ...] = ()
    own: tuple[tuple[int, int], ...] = ()
    inputs: tuple[int, int] = (0, 0)

    def first_with(self, number: int) -> int:
        """The first part that is of the module of this one."""
        return self.modules.index(self.modules[number])

    def own_lines(self, number: int) -> torch.Tensor:
        """Rows of its module that are this rank's of a part, int64, on the host."""
        begin, end = self.own[number]
        return torch.cat([torch.arange(*piece, device="cpu") for piece in self.pieces[number]])[begin:end]


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a method says about one matrix: its format, the tensors of a checkpoint that it is made of, and how.

    pack: from these tensors, by key, to the format's. None: they are the format's own, and are read into place.
    """

    format: WeightFormat
    sources: tuple[Source, ...]
    pack: Pack | None = None


class UnlikeError(ConfigError):
    """Modules of one matrix are quantized unlike. What each of them is may be asked (`mixed.scheme_of`)."""


class QuantizationMethod(ABC):
    """One convention of checkpoints, or a way to quantize plain ones while they are loaded.

    The registry (`config/quantization.py`) has classes; an instance is for one model: made without arguments it
    quantizes plain checkpoints, made by `of_checkpoint` it reads those that are quantized.
    """

    unused: str | None = None
    """A pattern of the names of tensors that its checkpoints hold and no product needs."""
    renamed: Mapping[str, str] = MappingProxyType({})
    """Ends of names of tensors (what follows the module's) that its checkpoints may have in place of others."""

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> QuantizationMethod:  # noqa: ARG003 (for those who do)
        """For a checkpoint that is quantized already.

        Args:
            config: its `quantization_config`.

        Raises:
            ConfigError: naming the key or value that is not supported.
        """
        raise ConfigError(f"{cls.__name__} makes quantized models of plain checkpoints and reads none", "quantization")

    @abstractmethod
    def scheme(self, info: MatrixInfo) -> Scheme:
        """What one matrix is.

        Raises:
            UnlikeError: its modules are quantized unlike; each is asked for by itself then.
            ConfigError: in a way that is not supported.
        """

    def refuses(self, device: torch.device, dtype: torch.dtype) -> str | None:  # noqa: ARG002 (for those who do)
        """Why models cannot run there so; None: they can."""
        return None


def scale_exactly(tensor: torch.Tensor, powers: torch.Tensor) -> None:
    """tensor [rows, …] of floats times powers of two [rows], in place. Raises ConfigError if its type has no room."""
    lines = powers.view(-1, *[1] * (tensor.dim() - 1))
    scaled = (tensor.float() * lines).to(tensor.dtype)
    if not torch.equal(scaled.float() / lines, tensor.float()):
        raise ConfigError(f"scales of keys and values cannot be taken into weights of {tensor.dtype}", "kv_cache_dtype")
    tensor.copy_(scaled)


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def plain_source(dtype: torch.dtype) -> Source:
    """What checkpoints that are not quantized have of a matrix, read into `dtype`."""
    return Source("weight", (OUTPUTS, INPUTS), FLOATS, dtype)


def plain_scheme(dtype: torch.dtype) -> Scheme:
    """For a matrix that is kept as checkpoints have it, in `dtype`."""
    return Scheme(FORMATS.get("plain")(), (plain_source(dtype),))


def unpacked(scheme: Scheme, dtype: torch.dtype) -> Scheme:
    """For a matrix that is multiplied otherwise than `Matrix.linear` does: kept in plain numbers, once and for all.

    A checkpoint's floats stay what they are; what is packed there is unpacked while it is read.
    """
    plain = plain_scheme(dtype)
    if scheme.sources == plain.sources:
        return plain

    def pack(read: Tensors) -> Tensors:
        packed = read if scheme.pack is None else scheme.pack(read)
        return plain.format.pack(scheme.format.matrix(packed, None).dense(dtype))

    return Scheme(plain.format, scheme.sources, pack)
