"""A step whose forward pass is launched, and whose sampling waits for masks."""

from __future__ import annotations

from collections.abc import Callable

from quire.foundation.errors import QuireError
from quire.types.plan import TokenMasks
from quire.types.result import StepResult
from quire.worker.readback import StepHandle


class MaskedStep:
    """sample: launches the rest of the step."""

    def __init__(self, step: int, sample: Callable[[TokenMasks], StepHandle]) -> None:
        self.step = step
        self._sample: Callable[[TokenMasks], StepHandle] | None = sample  # let go when used: it holds the logits
        self._handle: StepHandle | None = None
        self._error: Exception = QuireError(f"step {step} still awaits its masks")

    def mask(self, masks: TokenMasks) -> None:
        """Launch the rest; an error is raised by `result`."""
        sample, self._sample = self._sample, None
        try:
            if sample is None or masks.step != self.step:
                raise QuireError(f"masks of step {masks.step} came for step {self.step}")
            self._handle = sample(masks)
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        return self._handle is not None and self._handle.done()

    def result(self) -> StepResult:
        if self._handle is None:
            raise self._error
        return self._handle.result()
