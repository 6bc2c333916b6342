"""Numbers of a benchmark: to the screen, and as JSON with what is needed to repeat it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import quire
from quire.foundation.errors import ConfigError

PERCENTILES = (50, 90, 99)
SECRETS = ("api_key", "hf_token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig:
    output_json: str | None = None
    """File for the numbers."""

    def __post_init__(self) -> None:
        if self.output_json is not None:
            check_target(self.output_json, "output_json")


def check_target(name: str, option: str) -> None:
    """Raises ConfigError for a file that could not be written, before what stands in it takes its time."""
    file = Path(name)
    if file.is_dir():
        raise ConfigError(f"{option} {name!r} is a folder: name a file", option)
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {name!r} cannot be written: its folder does not exist", option)
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{option} {name!r} cannot be written: no right to", option)


def check_folder(name: str, option: str) -> None:
    """Makes a folder for files. Raises ConfigError if that cannot be."""
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {name!r} cannot be made: {error.strerror}", option) from None


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles of `values` x `scale`; empty for no values."""
    if not values:
        return {}
    array = np.asarray(values) * scale
    numbers = {"mean": float(array.mean()), "median": float(np.median(array)), "std": float(array.std())}
    return numbers | {f"p{p}": float(np.percentile(array, p)) for p in PERCENTILES}


def publish(title: str, numbers: Mapping[str, Any], report: ReportConfig, **about: Any) -> None:
    """Print the single numbers; write everything to the JSON file if one was asked for."""
    if numbers:
        print(title)
    for name, value in numbers.items():
        if isinstance(value, int | float):
            print(f"  {name:<28} {value:,.4g}" if isinstance(value, float) else f"  {name:<28} {value:,}")
    if report.output_json is None:
        return
    header = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(sys.argv[1:]),
        "quire": quire.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
    }
    if "options" in about:
        about["options"] = {name: value for name, value in about["options"].items() if name not in SECRETS}
    Path(report.output_json).write_text(json.dumps({**header, **about, **numbers}, indent=2) + "\n", encoding="utf-8")


def read_results(name: str) -> dict[str, Any]:
    """What `publish` has written. Raises ConfigError."""
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name!r} cannot be read: {error}", "results") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name!r} holds no result of quire bench", "results")
    return found


def _command(arguments: Sequence[str]) -> str:
    """The command to repeat, its secrets left out."""
    shown, hide = [], False
    for argument in arguments:
        name, equals, _ = argument.removeprefix("--").replace("-", "_").partition("=")
        is_secret = argument.startswith("--") and name in SECRETS
        shown.append("…" if hide else f"{argument.partition('=')[0]}=…" if is_secret and equals else argument)
        hide = is_secret and not equals
    return shlex.join(["quire", *shown])
