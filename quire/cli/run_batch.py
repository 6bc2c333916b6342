"""quire run-batch -i IN -o OUT [MODEL]"""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli import options
from quire.config.run_batch import RunBatchConfig
from quire.config.serve import ServeConfig

SHORT = {"-i": "--input-file", "-o": "--output-file"}


def run(arguments: Sequence[str]) -> int:
    given = [SHORT.get(argument, argument) for argument in arguments]
    if given and not given[0].startswith("-"):
        given.insert(0, "--model")
    values = options.parse(
        "run-batch",
        "Answer the requests of a file (-i), one a line in OpenAI's batch format, and write the results to another "
        "(-o). Started again after an interruption it goes on where it was.",
        given,
        (RunBatchConfig, *options.ENGINE_SECTIONS),
    )
    from quire.server.batches.run_batch import run_batch

    return run_batch(options.engine_config(values), ServeConfig(), options.section_of(RunBatchConfig, values))
