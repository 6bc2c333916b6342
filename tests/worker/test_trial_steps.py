import numpy as np
import pytest

from quire.worker.trial_steps import spread


@pytest.mark.parametrize(
    ("tokens", "rows", "most", "counts"),
    [(10, 4, 99, [3, 3, 2, 2]), (10, 4, 2, [2, 2, 2, 2]), (8192, 2, 512, [512, 512]), (3, 3, 1, [1, 1, 1])],
)
def test_no_row_is_longer_than_its_table(tokens: int, rows: int, most: int, counts: list[int]) -> None:
    found = spread(tokens, rows, most)
    assert found.tolist() == counts
    assert found.dtype == np.int32
