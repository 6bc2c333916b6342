"""docs/models.md: the families, from their files and from the configs that they are tested with.

python -m tests.models.table             measures how far each is from transformers and writes the page
python -m tests.models.table NAME ...    measures these alone, and keeps what the page says of the others
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quire.config.families import Family, families
from tests.models import checkpoints, features, sparse_checkpoints
from tests.models.cases import CASES, FAMILIES, HYBRIDS
from tests.models.fallback_cases import FALLBACK
from tests.models.paged import PagedRows
from tests.models.test_parity import expected, random_tokens
from tests.pooling import encoders
from tests.pooling.test_encoder_families import PROMPTS, of_tokens

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
ROOM = Path(__file__).parents[2] / "quire" / "models"
HEAD = """# Models

A model runs if `architectures` in its config.json is listed here. A family is one file; [adding one](adding_a_model.md)
takes no more. Every key of config.json that changes the maths is honoured or refused by name, and the variants listed
are compared with transformers token by token (`tests/models/test_families.py`, `test_sparse_parity.py`). The page is
made by `make docs`.

**Difference**: the largest of any token's log-probability from transformers, float32 on a CPU, over all variants, with
random weights. Families whose code transformers does not have are compared by way of one that computes the same
(`tests/models/twins.py`). **Ranks**: whether several GPUs may share each layer (`--tensor-parallel-size`).
**Prefixes**: whether prompts that begin alike are computed once by themselves, or if asked
(`--enable-prefix-caching`). **Adapters**: the largest difference, with an adapter of LoRA on every product, from
weights that it was added to. **8 bits**: the mean difference of weights in `--quantization int8` from what they were;
other [methods](quantization.md) go the same way. Both are of the last variant (`tests/models/test_features.py`).
Decoders also serve embedders and classifiers made of them (`...Model`, `...ForSequenceClassification`).

| Family | Architectures | Variants tested | Attention has | Ranks | Prefixes | Adapters | 8 bits | Lines | Difference |
|---|---|---|---|---|---|---|---|---|---|
"""
FOOT = """
## Encoders, for vectors

Compared are the states of every token (`tests/pooling/test_encoder_families.py`), and classes of texts and of tokens.
Several GPUs may share the layers of any.

| Family | Architectures | Variants tested | Lines | Difference |
|---|---|---|---|---|
"""
THROUGH = """
## Through transformers

Any other causal language model that the installed transformers has runs through its code (`pip install
quire[transformers]`), if it attends by transformers' attention interface: on the same paged cache, scheduler, prefix
cache and sampler. `--model-impl auto` does so where there is no family, `transformers` always, `quire` never. A line of
the log says it. What computes the same as layers here do is computed by the same kernels: whole decoder layers of
Llama's kind, else attention with its rotation, gated feed-forward layers, norms and plain products, each judged by
numbers once the weights are there, and the log says how many were found. The rest is the class's own code, step by
step. Ranks, quantization and pooling are not for such models; keys of config.json that mean nothing to the class are
named in the log.
Before the first request such a model is asked whether its tokens meet in attention
alone, whether positions are those it is given, and whether attention is what its class says. What cannot run so is
refused by name: state and convolution layers, encoders with decoders, parts that see or hear, masks of a class's
own (slopes of ALiBi may come as `alibi_slopes`, as flash-attention calls them), rotary settings that go by a text's
length beyond what was trained, and Mistral's own
form of files, whose queries and keys lie in another order.

Code that comes with a checkpoint (`auto_map`) is run only with `--trust-remote-code`, only if neither Quire nor
transformers has the class, and only in the worker, which has a process of its own then; the log names each file and its
hash. Tokenizers and templates run no code.

These classes are compared with transformers token by token (`tests/models/test_fallback.py`), and so are llama, qwen3
and gemma2. On an H200 Llama, Qwen 3 and Gemma 2 have run.

| Class | Config, beside sizes | Difference |
|---|---|---|
"""
NOTES = """
Slopes are of ALiBi: a bias linear in how far away a token is. transformers rounds Falcon's to bfloat16 position by
position, which is not done here. On an H200 families' logits in bfloat16 are compared with transformers' own
(`tests/models/test_gpu_parity.py`); Mistral 4, MPNet, ALBERT and DeBERTa have not been there yet.
"""
NOT_YET = """
## States

Families in `quire/models/hybrid` keep a state of each request in some layers or all. Their prefix cache keeps copies of
states at a few places of a prompt, and is off unless `--enable-prefix-caching` asks for it (the log says so). They take
no drafts. The prompts of Kimi Linear go through its state token by token on a GPU, without
the chunks that others have. Where config.json has no `max_position_embeddings`, as in
Mamba's, a request may hold 1,048,576 tokens. Nemotron-H's steps in time have `time_step_min` for a lower bound, as in
transformers.

## Dual chunks

Qwen2.5-1M (`dual_chunk_attention_config`): up to `chunk_size` - `local_size` tokens it is attention as usual, with
kernels, and that is the context unless `--max-model-len` asks for more. Beyond, plain torch attends, far slower, and a
query is scaled by the tokens that it sees itself, so that a prompt may be computed in parts. Sparse attention is
refused by name.

## Not yet

Attention to tokens that an indexer chooses (DeepSeek-V3.2, GLM-5), DeBERTa of the first version, and Jina Embeddings v3
with its adapters among the weights: refused by name. In transformers' form Jina's takes adapters of peft's: see
[LoRA](lora.md).
"""


def variants(family: str) -> list[str]:
    """Of the cases whose architecture is the family's."""
    if family in sparse_checkpoints.FAMILIES:
        return [f"{family}-{name}" for name in sparse_checkpoints.FAMILIES[family]]
    return [name for name in CASES if name == family or name.startswith(f"{family}-") or name in KIN.get(family, ())]


KIN = {"mistral": ("ministral",)}
_COLUMNS = 10  # of the families' table


def render(differences: dict[str, str]) -> str:
    both = families().items()
    rows = [
        _row(name, family, differences)
        for name, family in both
        if "hidden_size" in family.defaults and not _is_encoder(family)
    ]
    encoders = [_encoder_row(name, family, differences.get(name, "-")) for name, family in both if _is_encoder(family)]
    through = THROUGH + "".join(
        f"| {checkpoints.class_name(made)} | {', '.join(config) or '-'} | "
        f"{differences.get(checkpoints.class_name(made), '-')} |\n"
        for made, config in FALLBACK.values()
    )
    return HEAD + "\n".join(rows) + "\n" + NOTES + FOOT + "\n".join(encoders) + "\n" + through + NOT_YET


def _is_encoder(family: Family) -> bool:
    return family.module.startswith("quire.models.encoders.")


def _encoder_row(name: str, family: Family, difference: str) -> str:
    told = [case.removeprefix(f"{name}-") for case in encoder_variants(name) if case != name]
    cells = (name, ", ".join(family.architectures), ", ".join(told) or "-", str(_lines(family)), difference)
    return f"| {' | '.join(cells)} |"


def encoder_variants(family: str) -> list[str]:
    return [case for case in encoders.CASES if case.partition("-")[0] == family]


def _row(name: str, family: Family, differences: dict[str, str]) -> str:
    told = [case.removeprefix(f"{name}-") for case in variants(name) if case != name]
    marks = (
        ", ".join(term for term, is_there in _terms(family).items() if is_there),
        "yes" if family.shared else "one",
        "if asked" if family.module.startswith("quire.models.hybrid.") else "yes",
    )
    adapters, codes, difference = (differences.get(key, "-") for key in (*_told(name), name))
    architectures = ", ".join(family.architectures)
    told_of = (", ".join(told) or "-", *marks, adapters, codes, str(_lines(family)), difference)
    return f"| {' | '.join((name, architectures, *told_of))} |"


def _told(family: str) -> tuple[str, str]:
    """What its adapters and its codes of 8 bits are called in `differences_of`."""
    return f"{family} with adapters", f"{family} in 8 bits"


def _terms(family: Family) -> dict[str, bool]:
    """What its attention has besides products of queries and keys."""
    source = _source(family)
    return {
        "windows": "sliding_window" in family.defaults,
        "chunks": "chunk=" in source,
        "soft caps": any("softcapping" in key for key in family.defaults),
        "sinks": "sinks=" in source,
        "slopes": "slopes=" in source,
    }


def _source(family: Family) -> str:
    path = family.module.removeprefix("quire.models.").replace(".", "/")
    return (ROOM / f"{path}.py").read_text(encoding="utf-8")


def _lines(family: Family) -> int:
    return len(_source(family).splitlines())


def differences_of(page: str) -> dict[str, str]:
    """What a page says, by family."""
    found = {}
    for line in re.findall(r"^\| \w+ \|.*\|$", page, re.MULTILINE):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[cells[0]] = cells[-1]
        if len(cells) == _COLUMNS:
            found |= zip(_told(cells[0]), cells[-4:-2], strict=True)
    return found


def measure(names: Sequence[str] = ()) -> dict[str, str]:
    """names: of families or classes; none: of all."""
    every = dict.fromkeys([*FAMILIES, *sparse_checkpoints.FAMILIES, *(case.partition("-")[0] for case in HYBRIDS)])
    found = {family: max(map(difference, variants(family))) for family in every if not names or family in names}
    for family in families():
        if (cases := encoder_variants(family)) and (not names or family in names):
            found[family] = max(map(encoder_difference, cases))
    for made, config in FALLBACK.values():
        if names and checkpoints.class_name(made) not in names:
            continue
        found[checkpoints.class_name(made)] = _difference(checkpoints.make(made, **config), "transformers")
    for family in every:
        if not names or family in names:
            with tempfile.TemporaryDirectory() as folder:
                does = features.measure(variants(family)[-1], Path(folder))
            found |= zip(_told(family), (does.adapters, does.codes), strict=True)
    return {name: f"{largest:.0e}" for name, largest in found.items()}


def encoder_difference(case: str) -> float:
    """Of prompts of unlike length, the states of all their tokens."""
    with tempfile.TemporaryDirectory() as folder:
        reference = encoders.make(case, Path(folder))
        found = of_tokens(Path(folder))
    both = zip(found, PROMPTS, strict=True)
    return max((ours - encoders.states(reference, prompt)).abs().max().item() for ours, prompt in both)


def difference(case: str) -> float:
    return _difference(features.make(case))


def _difference(reference: Any, impl: str = "auto") -> float:
    """Of four prompts of unlike length, together."""
    tokens = sorted(random_tokens(0, [50, 1, 17, 33]), key=len)
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoints.load(checkpoints.save(reference, Path(folder)), impl=impl)
    ours = PagedRows(model).step([1, 2, 3, 4], tokens)
    both = zip(ours, expected(reference, tokens), strict=True)
    return max((torch.log_softmax(a, -1) - torch.log_softmax(b, -1)).abs().max().item() for a, b in both)


if __name__ == "__main__":
    told = differences_of(PAGE.read_text(encoding="utf-8")) if sys.argv[1:] else {}
    PAGE.write_text(render({**told, **measure(sys.argv[1:])}), encoding="utf-8")
