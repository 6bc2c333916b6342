"""quire complete [MODEL]"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quire.cli import options
from quire.cli.talk import TalkConfig, open_talker, show


def run(arguments: Sequence[str]) -> int:
    values = options.parse(
        "complete",
        "Continue texts, one a line of the input (or the one of --quick): here, or with --url on a server.",
        arguments,
        (TalkConfig, *options.ENGINE_SECTIONS),
        positional=("model",),
        defaults={"disable_log_stats": True},  # the engine's statistics would stand in the middle of answers
    )
    talk = options.section_of(TalkConfig, values)
    talker = open_talker(talk, options.engine_config(values))
    try:
        texts = sys.stdin if talk.quick is None else [talk.quick]
        for text in texts:
            if text.rstrip("\n"):
                show(talker, text.rstrip("\n"), talk)
        return 0
    finally:
        talker.close()
