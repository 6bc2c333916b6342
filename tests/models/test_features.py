"""Every family begins where a cached prompt ends, takes adapters of all its products, and codes of 8 bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.effort import sampled
from tests.models import sparse_checkpoints
from tests.models.cases import FAMILIES, HYBRIDS
from tests.models.features import measure
from tests.models.table import variants

USUAL = ("llama", "nemotron_h", "deepseek_v3", "gpt2")
EVERY = list(dict.fromkeys([*FAMILIES, *sparse_checkpoints.FAMILIES, *(case.partition("-")[0] for case in HYBRIDS)]))


@pytest.mark.parametrize("family", sampled(EVERY, USUAL.__contains__))
def test_what_a_familys_models_do(family: str, tmp_path: Path) -> None:
    """Adapters compute what they do in the weights. Codes of 8 bits round a weight by a part in 256 of its line's
    largest: so much of random numbers, one in a hundred of a logit, and more where a state goes on with it."""
    found = measure(variants(family)[-1], tmp_path)
    assert found.cached > 0
    assert found.same
    assert found.adapters <= 1e-4
    assert 0 < found.codes < 0.25
