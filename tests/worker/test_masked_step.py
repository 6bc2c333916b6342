"""A step in two halves: what goes wrong in the second one, its result tells."""

from __future__ import annotations

import numpy as np
import pytest

from quire.foundation.errors import QuireError
from quire.types.plan import TokenMasks
from quire.types.result import StepResult
from quire.worker.masked_step import MaskedStep
from quire.worker.readback import ReadyStep

NOTHING = np.zeros(0, np.int32)
RESULT = StepResult(step=4, tokens=NOTHING, counts=NOTHING)


def masks(step: int) -> TokenMasks:
    return TokenMasks(step, NOTHING, np.zeros((0, 1), np.int32))


def test_the_result_is_there_after_the_masks() -> None:
    given: list[TokenMasks] = []
    step = MaskedStep(4, lambda masks: given.append(masks) or ReadyStep(RESULT))
    assert not step.done()
    with pytest.raises(QuireError, match="step 4 still awaits its masks"):
        step.result()
    step.mask(masks(4))
    assert given[0].step == 4
    assert step.done()
    assert step.result() is RESULT


def test_errors_of_the_second_half_are_the_steps() -> None:
    def fail(_: TokenMasks) -> ReadyStep:
        raise ZeroDivisionError("no device")

    step = MaskedStep(4, fail)
    step.mask(masks(4))
    with pytest.raises(ZeroDivisionError, match="no device"):
        step.result()


def test_masks_of_another_step_are_not_taken() -> None:
    step = MaskedStep(4, lambda _: ReadyStep(RESULT))
    step.mask(masks(3))
    with pytest.raises(QuireError, match="masks of step 3 came for step 4"):
        step.result()
