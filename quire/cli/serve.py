"""quire serve [MODEL]"""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli import options
from quire.config.serve import ServeConfig


def run(arguments: Sequence[str]) -> int:
    values = options.parse(
        "serve",
        "Serve a model over HTTP with OpenAI's API. Without MODEL: the demo model. "
        "--config FILE reads the same options from YAML; the command line wins.",
        arguments,
        (*options.ENGINE_SECTIONS, ServeConfig),
        positional=("model",),
    )
    config = options.engine_config(values)
    from quire.engine import early

    early.begin(config)
    from quire.foundation.heap import imports_that_stay

    with imports_that_stay():
        from quire.server.processes.run import run_server
    return run_server(config, options.section_of(ServeConfig, values))
