"""`quire COMMAND …`: finds the command's file and runs it. Nothing heavy is imported until then."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "serve": ("quire.cli.serve", "Serve a model over HTTP with OpenAI's API"),
    "worker": ("quire.cli.worker", "One rank of an engine on several machines"),
    "route": ("quire.cli.route", "One address for many servers, by prompt and load"),
    "chat": ("quire.cli.chat", "Talk to a model, here or on a server"),
    "complete": ("quire.cli.complete", "Continue a text, here or on a server"),
    "simulate": ("quire.cli.simulate", "Predict throughput and latency of a trace, without a GPU"),
    "top": ("quire.cli.top", "A running server at a glance"),
    "bench": ("quire.cli.bench.main", "Measure: throughput, latency, serve, sweep, startup; compare, plot"),
    "profile": ("quire.cli.profile", "Where the time of a step goes, beside what it would take at best"),
    "run-batch": ("quire.cli.run_batch", "Answer the requests of a file, without a server"),
    "inspect": ("quire.cli.inspect_model", "What a model takes and whether it runs here, before it is fetched"),
    "doctor": ("quire.cli.doctor", "What this machine can run, and why not"),
    "explain": ("quire.cli.explain", "What an error means, by its code, and what to do"),
    "collect-env": ("quire.cli.collect_env", "Versions and hardware, for a bug report"),
}
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 fine, 1 failed, 2 a bad option or model, 3 does not fit in memory, 4 the engine died."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in ("-v", "--verbose") and len(arguments) > 1:
        arguments = [*arguments[1:], arguments[0]]
    name, *rest = arguments
    if name in ("-v", "-V", "--version"):
        from quire import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        from quire.cli.failure import tell
        from quire.foundation.errors import ConfigError

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        tell(ConfigError(f"there is no command {name!r}{hint}", code="unknown-command"), is_verbose=False)
        return EXIT_USAGE
    return run_command(COMMANDS[name][0], rest)


def run_command(module: str, arguments: list[str]) -> int:
    """Run `module.run(arguments)`; an error becomes a few lines and an exit code. `-v` shows where it came from."""
    from quire.foundation.bytecode import keep_bytecode

    verbose = [argument for argument in arguments if argument in ("-v", "--verbose")]
    keep_bytecode("torch")
    try:
        return int(importlib.import_module(module).run([one for one in arguments if one not in verbose]) or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has left
        sys.stdout = None  # nothing to flush at exit
        return 0
    except Exception as error:
        from quire.cli.failure import exit_code, tell

        tell(error, is_verbose=bool(verbose))
        return exit_code(error)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: quire COMMAND …", "", *lines, "", "quire COMMAND --help shows the options of a command."])


if __name__ == "__main__":
    sys.exit(main())
