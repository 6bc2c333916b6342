"""quire explain [CODE]: the catalogue of errors in a terminal."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from quire.cli.failure import plain
from quire.foundation.error_codes import TITLES, entries


def run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: quire explain CODE\n")
        for title, part in TITLES.items():
            print(f"{title}\n  " + "\n  ".join(f"{entry.code:<18} {entry.cause}" for entry in part))
        return 0
    entry = entries().get(arguments[0])
    if entry is None:
        near = difflib.get_close_matches(arguments[0], entries(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"quire: error: there is no error {arguments[0]!r}{hint}; `quire explain` lists them", file=sys.stderr)
        return 2
    print(f"{entry.code}\n\n  {plain(entry.cause)}\n  {plain(entry.remedy)}")
    if entry.more:
        print(f"\n  {plain(entry.more)}")
    return 0
