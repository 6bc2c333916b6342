"""quire bench KIND …"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from quire.foundation.errors import ConfigError

KINDS = {
    "throughput": "Tokens a second of many requests at once, in this process",
    "latency": "Seconds of one batch from start to end, in this process",
    "serve": "Time to first token and gaps of a running server under a given load",
    "sweep": "The same at several rates or with several requests at once: a curve",
    "compare": "Two results beside each other, and whether they differ by more than the noise",
    "plot": "Curves of sweeps, as PNG, SVG or HTML",
    "startup": "Seconds from nothing to the first token, in fresh processes",
}


def run(arguments: Sequence[str]) -> int:
    kind = arguments[0] if arguments else ""
    if kind in KINDS:
        return int(importlib.import_module(f"quire.cli.bench.{kind}").run(arguments[1:]))
    asked = kind in ("-h", "--help")
    if kind and not asked:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f" (there are: {', '.join(KINDS)})"
        raise ConfigError(f"quire bench: there is no {kind!r}{hint}", code="unknown-command")
    usage = "\n".join(["usage: quire bench KIND …", "", *(f"  {name:<10}  {text}" for name, text in KINDS.items())])
    print(usage, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
