"""What attention backends of other libraries have in common: why they cannot serve a model here."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from quire.attention.base import AttentionSpec
from quire.kernels.dispatch import device_on_cuda

HALVES = (torch.float16, torch.bfloat16)


def missing(package: str, least: tuple[int, int]) -> str | None:
    """Why a library cannot be used; None: it can. least: version of it."""
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    try:
        version = str(importlib.import_module(package).__version__)
    except Exception as error:  # built for another torch, or another system
        return f"the package {package} cannot be imported: {error}"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return None if numbers >= least else f"{package} {version} is older than {'.'.join(map(str, least))}"


def refuses_as_all_do(spec: AttentionSpec, head_dims: tuple[int, ...]) -> str | None:
    """What none of them can, as they are used here."""
    group, rest = divmod(spec.num_heads, spec.num_kv_heads)
    if not device_on_cuda(spec.device) or torch.version.hip is not None:
        return f"needs the platform cuda, and this is {spec.device.type}"
    if torch.cuda.get_device_capability(spec.device) < (8, 0):
        return f"needs compute capability 8.0, {torch.cuda.get_device_name(spec.device)} has less"
    if spec.dtype not in HALVES:
        return f"needs float16 or bfloat16, not {spec.dtype}"
    if spec.kv_dtype != spec.dtype:
        return f"a cache of {spec.kv_dtype} is not handed to it"
    if spec.head_dim not in head_dims:
        return f"head_dim {spec.head_dim} is none of {', '.join(map(str, head_dims))}"
    if rest or not group:
        return f"{spec.num_heads} heads do not divide among {spec.num_kv_heads} KV heads"
    if spec.value_dim:
        return "latent rows, which are keys and values at once, are not handed to it"
    scores = spec.scores
    if not scores.are_plain or scores.chunked:
        terms = {
            "a soft cap of scores": scores.softcap, "a logit a head that no token has (a sink)": scores.sinks,
            "a bias linear in the distance (ALiBi)": scores.slopes, "attention in chunks": scores.chunked,
            "dual chunk attention": scores.dual_chunk,
        }  # fmt: skip
        return f"{' and '.join(term for term, there in terms.items() if there)} is not handed to it"
    if spec.drafted[0]:
        return "rows with drafts may see fewer tokens than their queries count"
    return None
