"""`quire COMMAND …`: finds the command's file and runs it. Nothing heavy is imported until then."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "serve": ("quire.cli.serve", "Serve a model over HTTP with OpenAI's API"),
    "chat": ("quire.cli.chat", "Talk to a model, here or on a server"),
    "complete": ("quire.cli.complete", "Continue a text, here or on a server"),
    "bench": ("quire.cli.bench.main", "Measure: throughput, latency, serve, startup"),
    "run-batch": ("quire.cli.run_batch", "Answer the requests of a file, without a server"),
    "inspect": ("quire.cli.inspect_model", "What a model takes and whether it runs here, before it is fetched"),
    "doctor": ("quire.cli.doctor", "What this machine can run, and why not"),
    "collect-env": ("quire.cli.collect_env", "Versions and hardware, for a bug report"),
}
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 fine, 1 failed, 2 a bad option or model, 3 does not fit in memory, 4 the engine died."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else EXIT_USAGE
    name, *rest = arguments
    if name in ("-v", "-V", "--version"):
        from quire import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"quire: there is no command {name!r}{hint}\n\n{_usage()}", file=sys.stderr)
        return EXIT_USAGE
    return run_command(COMMANDS[name][0], rest)


def run_command(module: str, arguments: list[str]) -> int:
    """Run `module.run(arguments)`; an error that was raised on purpose becomes one line and an exit code."""
    from quire.foundation.bytecode import keep_bytecode
    from quire.foundation.errors import ConfigError, DoesNotFitError, EngineDeadError, InputError, QuireError

    keep_bytecode("torch")
    try:
        return int(importlib.import_module(module).run(arguments) or 0)
    except (ConfigError, InputError) as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return 3 if isinstance(error, DoesNotFitError) else EXIT_USAGE
    except EngineDeadError as error:
        print(f"quire: error: the engine stopped: {error}", file=sys.stderr)
        return 4
    except QuireError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"quire: error: {error.name!r} is not installed: pip install 'quire[{extra}]'", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has left
        sys.stdout = None  # nothing to flush at exit
        return 0


_EXTRAS = {
    **dict.fromkeys(
        ("fastapi", "uvicorn", "httptools", "orjson", "prometheus_client", "pydantic", "python_multipart"), "server"
    ),
    "aiohttp": "bench",
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: quire COMMAND …", "", *lines, "", "quire COMMAND --help shows the options of a command."])


if __name__ == "__main__":
    sys.exit(main())
