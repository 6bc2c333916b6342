"""What a chat template may cost: steps, processor time, and the size of everything it makes.

The checks come before a value is made, and of sizes that are easily told. They hold for the templates of checkpoints
and operators; a stranger's template has a process of its own besides (`templates/sandbox.py`).
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.sandbox

MAX_STEPS = 1_000_000  # of loops, and calls
MAX_SECONDS = 2.0  # of processor time
MAX_CHARS = 64 * 1024 * 1024  # of the prompt and of any text or list made on the way
MAX_BITS = 4096  # of an integer
MAX_INDENT = 64  # of JSON
_CLOCK_STEPS = 8  # steps between two looks at the clock
_NUMBERS = re.compile(r"\d+")


class Meter:
    """Of one rendering."""

    def __init__(self) -> None:
        self._steps_left = MAX_STEPS
        self._deadline = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise jinja2.TemplateRuntimeError(f"more than {MAX_STEPS} loop steps and calls")
        if self._steps_left % _CLOCK_STEPS == 0 and time.thread_time() > self._deadline:
            raise jinja2.TemplateRuntimeError(f"more than {MAX_SECONDS:g} s of processor time")


_METER: ContextVar[Meter | None] = ContextVar("meter", default=None)  # no template can reach it


@contextmanager
def metered() -> Iterator[None]:
    """For one rendering."""
    token = _METER.set(Meter())
    try:
        yield
    finally:
        _METER.reset(token)


def meter() -> Meter:
    """Of this rendering; of constants that are folded, one that nothing else counts on."""
    return _METER.get() or Meter()


def check_size(size: int) -> int:
    if size > MAX_CHARS:
        raise jinja2.TemplateRuntimeError(f"a text of {size} characters is over the limit of {MAX_CHARS}")
    return size


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Of +, *, ** and %."""
    if isinstance(left, int) and isinstance(right, int):
        bits = {"**": left.bit_length() * right, "*": left.bit_length() + right.bit_length()}
        if bits.get(operator, 0) > MAX_BITS:
            raise jinja2.TemplateRuntimeError(f"a number is over the limit of {MAX_BITS} bits")
    elif operator == "%" and isinstance(left, str):
        check_percent(left, right)
    elif operator == "*":
        times, items = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(times, int):
            check_size(_size(items) * times)
    elif operator == "+":
        check_size(_size(left) + _size(right))


def check_call(called: Any, args: tuple[Any, ...]) -> None:
    """Of the methods of texts and bytes that can make more than they are given."""
    method = getattr(called, "__wrapped__", called)  # the sandbox wraps str.format
    text = getattr(method, "__self__", None)
    if not isinstance(text, str | bytes):
        return
    name = method.__name__
    if name in ("center", "ljust", "rjust", "zfill"):
        check_size(max([len(text), *_integers(args)]))
    elif name == "expandtabs":
        check_size(len(text) * max([8, *_integers(args)]))
    elif name == "replace" and len(args) >= 2:
        check_size(len(text) + text.count(args[0]) * _size(args[1]))
    elif name == "translate" and args and isinstance(args[0], Mapping):
        check_size(len(text) * max((_size(value) for value in args[0].values()), default=1))
    elif name == "join" and args:
        check_join(args[0], len(text))
    elif name in ("format", "format_map"):
        _check_widths(str(text))


def check_percent(form: str, values: Any) -> None:
    """`form % values`"""
    _check_widths(form)
    items = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple) else (values,)
    check_size(len(form) + form.count("%") * max(map(_size, items), default=0))
    if "*" in form:
        raise jinja2.TemplateRuntimeError("a format must not take its widths from values")


def check_join(items: Any, separator: int) -> None:
    if isinstance(items, list | tuple):
        check_size(sum(map(_size, items)) + separator * len(items))


def bounded(form: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose integer arguments are widths, and which writes no more than that much for every character."""

    at = int(hasattr(form, "jinja_pass_arg"))  # the first argument is the environment, say

    @functools.wraps(form)
    def checked(*args: Any, **kwargs: Any) -> Any:
        numbers = [abs(number) for number in (*_integers(args[at + 1 :]), *_integers(kwargs.values()))]
        if numbers:
            check_size(max(numbers) * (1 + _lines(args[at])))
        return form(*args, **kwargs)

    return checked


def _check_widths(form: str) -> None:
    if re.search(r"\{[^{}]*\{", form):
        raise jinja2.TemplateRuntimeError("a format must not take its widths from values")
    check_size(sum(int(number) if len(number) < 12 else MAX_CHARS + 1 for number in _NUMBERS.findall(form)))


def _integers(values: Iterable[Any]) -> list[int]:
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool)]


def _lines(value: Any) -> int:
    return value.count("\n") if isinstance(value, str) else 0


def _size(value: Any) -> int:
    """Of what has one."""
    return len(value) if isinstance(value, str | bytes | list | tuple | Mapping) else 1
