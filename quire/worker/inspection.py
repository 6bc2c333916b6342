"""A model that is built without its numbers, on a device that keeps none: what it takes, and what fits beside it.

It is the model that an engine builds and the arithmetic by which a worker sizes its cache, so both say the same.
Run as a process: a Question on standard input, Findings on standard output, for commands that import no torch.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import cast

import msgspec
import torch
from torch import nn

from quire.attention.select import ORDER, PLAIN, PROMPT_ORDER, select, select_for_prompts
from quire.config.devices import platform_of
from quire.config.inspection import Findings, Fit, Question
from quire.config.parallel.contexts import check_layers
from quire.config.resolve import Resolved
from quire.distributed.group import Group
from quire.distributed.topology import Topology
from quire.foundation.bytecode import keep_bytecode
from quire.foundation.child import Failure, leave
from quire.foundation.errors import ConfigError, DoesNotFitError, QuireError
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.models import catalog
from quire.models.base import Decoder, keep_states_in
from quire.models.pooling import PoolingModel
from quire.quantization.base import FORMATS, WeightFormat
from quire.quantization.select import make_method
from quire.types.kv import capacity, tokens_held
from quire.worker.assembly import DTYPES, attention_spec
from quire.worker.memory import CacheSize, Memory, size_cache
from quire.worker.pages import Pages, lay_out

_NOWHERE = torch.device("meta")
_DRIVER = 512 * 1024**2  # bytes that the driver takes of an empty GPU for a process
_CONTEXTS = (1024, 8192, 32768, 131072)
Model = Decoder | PoolingModel


@dataclass(frozen=True, slots=True)
class _OneOf:
    """A rank that meets no other: enough to build its share."""

    topology: Topology


def inspect(question: Question) -> Findings:
    """Raises ConfigError for a model that cannot be built."""
    resolved, block_size = question.resolved, question.resolved.config.cache.block_size
    ranks = resolved.config.runtime.tensor_parallel_size
    whole = _build(resolved, 1)
    model = whole if ranks == 1 else _build(resolved, ranks)
    keep_states_in(model, DTYPES[resolved.config.cache.state_dtype])
    pages = lay_out(model.kv_groups(block_size, DTYPES[resolved.kv_dtype]), block_size)
    check_layers(resolved.config.runtime, resolved.info, pages.groups)
    memory = _memory(question, model)
    findings = Findings(
        parameters=_parameters(whole),
        active_parameters=whole.num_weights(),
        weight_bytes=model.num_bytes(),
        weight_formats=_formats(model),
        activation_bytes=memory.activations,
        groups=pages.groups,
        page_bytes=pages.page_bytes,
        attention=_attention(resolved, model, pages),
        kernels="Triton" if platform_of(resolved.device) == "cuda" else "plain torch",
    )
    try:
        size = size_cache(resolved, pages, memory)
    except DoesNotFitError as error:
        return msgspec.structs.replace(findings, too_large=str(error))
    return msgspec.structs.replace(
        findings,
        num_blocks=size.num_blocks,
        max_model_len=size.max_model_len,
        note=size.note,
        fits=_fits(resolved, pages, size),
    )


def _build(resolved: Resolved, ranks: int) -> Model:
    dtype, positions = DTYPES[resolved.dtype], resolved.max_model_len
    method = make_method(resolved.quantization, resolved.info.quantization)
    group = cast(Group, _OneOf(Topology(0, ranks))) if ranks > 1 else None
    if resolved.pooler is None:
        return catalog.build(resolved.info, dtype, _NOWHERE, positions, method, group)
    return catalog.build_for_pooling(resolved.info, resolved.pooler, dtype, _NOWHERE, positions, method, group)


def _parameters(model: nn.Module) -> int:
    """Numbers that the parameters stand for, those of all experts."""
    total = 0
    for module in model.modules():
        if isinstance(module, Experts):
            total += module.num_weights() // module.top_k * module.experts
        elif isinstance(module, Linear):
            total += module.num_weights()
        else:
            total += sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return total


def _formats(model: nn.Module) -> dict[str, int]:
    """Bytes by weight format; what is no matrix is kept as it is."""
    found: Counter[str] = Counter()
    for module in model.modules():
        held = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
        if isinstance(module, Experts):
            found[_name(module.format)] += int(module.num_bytes())
        elif held:
            found[_name(module.scheme.format) if isinstance(module, Linear) else "plain"] += held
    return dict(found)


def _name(made: WeightFormat) -> str:
    return next((name for name in FORMATS if type(made) is FORMATS.get(name)), type(made).__name__)


def _memory(question: Question, model: Model) -> Memory:
    hardware, weights = question.hardware, model.num_bytes()
    if question.resolved.device == "cpu":
        return Memory(is_cpu=True, free=max(hardware.free - weights, 0), weights=weights, activations=0)
    activations = _activations(question.resolved, model)
    free = min(hardware.free, hardware.total - _DRIVER) - weights
    return Memory(is_cpu=False, free=free, weights=weights, activations=activations)


def _activations(resolved: Resolved, model: Model) -> int:
    """Of the largest step, about: the residual and two of the widest products for each token, and the logits.

    What a worker measures depends on the kernels; it is of this size.
    """
    wide = [m for name, m in model.named_modules() if isinstance(m, Linear) and not name.endswith("lm_head")]
    widest = max((module.in_features + module.out_features for module in wide), default=0)
    most, copies = resolved.max_num_batched_tokens, resolved.config.runtime.prefill_context_parallel_size
    numbers = most // copies * (2 * widest + 4 * model.hidden)
    if copies > 1:  # the residual of all
        numbers += 2 * most * model.hidden
    tokens = numbers * DTYPES[resolved.dtype].itemsize
    logits = 0 if isinstance(model, PoolingModel) else 2 * resolved.max_num_seqs * resolved.info.vocab_size * 4
    return tokens + logits


def _attention(resolved: Resolved, model: Model, pages: Pages) -> str:
    """The backend of the first group."""
    name, platform = resolved.config.runtime.attention_backend, platform_of(resolved.device)
    for_prompts = isinstance(model, PoolingModel) and not model.is_causal
    device = torch.device(resolved.device.partition(":")[2] or platform)
    tokens = resolved.max_num_batched_tokens
    spec = attention_spec(resolved, model, pages, 0, device, tokens, resolved.max_model_len)
    if device.type == "cuda" and not torch.cuda.is_available():
        order = (PROMPT_ORDER if for_prompts else ORDER).get(platform, PLAIN)
        return f"{order[0] if name == 'auto' else name} (not asked: there is no such GPU here)"
    return str((select_for_prompts if for_prompts else select)(name, spec, platform).name)


def _fits(resolved: Resolved, pages: Pages, size: CacheSize) -> list[Fit]:
    """Requests at once, at the longest context and some shorter ones."""
    if pages.whole_prompts:
        return [Fit(size.max_model_len, resolved.max_num_seqs)]
    longest = size.max_model_len
    lengths = sorted({longest, *(length for length in _CONTEXTS if length < longest)})
    assert longest <= capacity(pages.groups, size.num_blocks)
    return [
        Fit(length, min(max(tokens_held(pages.groups, size.num_blocks, length) // length, 1), resolved.max_num_seqs))
        for length in lengths
    ]


def main() -> int:
    keep_bytecode("torch")
    asked = sys.stdin.buffer.read()
    if not asked:  # who started this was interrupted
        return 0
    question = msgspec.msgpack.decode(asked, type=Question)
    out = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no part of the answer
    answer: Findings | Failure
    try:
        answer = inspect(question)
    except QuireError as error:
        answer = Failure.of(error)
    except Exception as error:
        answer = Failure.of(ConfigError(f"the model cannot be built: {type(error).__name__}: {error}"))
    out.buffer.write(msgspec.msgpack.encode([isinstance(answer, Findings), answer]))
    out.flush()
    return 0


if __name__ == "__main__":
    leave(main())
