"""When an answer that runs in circles is ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.foundation.errors import InputError
from quire.foundation.shown import shown

MAX_PATTERN = 1024  # tokens: every token of the answer is compared with so many before it
MAX_COUNT = 2**16
_LIMITS = {"max_pattern_size": MAX_PATTERN, "min_pattern_size": MAX_PATTERN, "min_count": MAX_COUNT}


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True):
    """An answer ends with "repetition" once its last tokens are one pattern, `min_count` times in a row.

    Sizes are tokens; min_pattern_size 0 means 1, max_pattern_size 0 switches it off. Raises `InputError` naming the
    field.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name, most in _LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise _wrong(f"{name} must be an integer in [0, {most}], got {shown(value)}")
        if self.min_pattern_size > self.max_pattern_size:
            raise _wrong(
                f"min_pattern_size must be <= max_pattern_size ({self.max_pattern_size}), got {self.min_pattern_size}"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise _wrong(f"min_count must be >= 2, got {self.min_count}")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> RepetitionDetectionParams:
        """Raises `InputError` for an unknown field."""
        unknown = next((name for name in fields if name not in _LIMITS), None)
        if unknown is not None:
            raise _wrong(f"there is no field {shown(unknown)} (there are: {', '.join(_LIMITS)})")
        return cls(**fields)


def _wrong(what: str) -> InputError:
    return InputError(f"repetition_detection: {what}", "repetition_detection")
