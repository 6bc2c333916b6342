"""One format for every measured figure: benchmarks/results/<date>-<commit>-<device>[-<part>].json."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import is_rate

FOLDER = Path(__file__).parent / "results"


@dataclass
class Row:
    test: str
    model: str
    case: str
    metric: str
    value: float
    unit: str
    floor: float | None = None  # what the hardware's measured ceilings would allow
    peer: float | None = None  # the better of the measured peers


def commit() -> str:
    """The commit measured; QUIRE_COMMIT says it where the tree travels without its history."""
    if os.environ.get("QUIRE_COMMIT"):
        return os.environ["QUIRE_COMMIT"]
    asked = ["git", "-C", str(FOLDER), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def write(
    rows: Sequence[Row],
    device: str,
    command: str,
    settings: dict[str, Any],
    folder: Path = FOLDER,
    part: str = "",
) -> Path:
    """part: what distinguishes this file from others of the same commit and device."""
    import torch

    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = None
    now = datetime.datetime.now(tz=datetime.UTC)
    folder.mkdir(parents=True, exist_ok=True)
    slug = "-".join(re.findall(r"[a-z0-9]+", device.lower()))
    path = folder / f"{now:%Y-%m-%d}-{commit()}-{slug}{f'-{part}' if part else ''}.json"
    content = {
        "date": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "commit": commit(),
        "device": device,
        "torch": torch.__version__,
        "triton": triton_version,
        "command": command,
        "settings": settings,
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def table(rows: Sequence[Row]) -> str:
    """Plain text for a terminal."""
    lines = [f"{'test':5}{'model':14}{'case':12}{'metric':16}{'value':>12}{'floor':>12}{'peer':>12}{'vs peer':>9}"]
    for r in rows:
        rate = is_rate(r.metric)
        ratio = f"{(r.value / r.peer if rate else r.peer / r.value):.2f}x" if r.peer and r.value else ""
        cells = [
            f"{x:,.3f}" if x is not None and x < 100 else f"{x:,.0f}" if x is not None else ""
            for x in (r.value, r.floor, r.peer)
        ]
        lines.append(
            f"{r.test:5}{r.model:14}{r.case:12}{r.metric:16}{cells[0]:>12}{cells[1]:>12}{cells[2]:>12}{ratio:>9}"
        )
    return "\n".join(lines)
