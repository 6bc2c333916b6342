"""Every command and program in the documentation is one that could be typed: options, names, routes and files exist.

Those marked `<!-- run -->` are executed too (test_run.py).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import itertools
import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

import quire
from quire.cli import chat, main, profile, top
from quire.cli.bench import client, compare, latency, plot, report, serve, startup, sweep, throughput, workload
from quire.cli.bench import main as bench_main
from quire.cli.options import ALIASES, ENGINE_SECTIONS
from quire.cli.talk import TalkConfig
from quire.config.engine import SECTIONS
from quire.config.serve import ServeConfig
from quire.config.unsupported import SHORT
from quire.server.app import ROUTERS
from quire.server.operations import adapters, development, profiling
from tests.docs.blocks import Block, blocks, commands, is_shell

ROOT = Path(__file__).parents[2]
ALL = blocks()
COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:\S*/)?quire\s")
SERVING = (client.ServeBenchConfig, workload.WorkloadConfig, report.ReportConfig)
SECTIONS_OF = {
    "serve": (*ENGINE_SECTIONS, ServeConfig),
    "chat": (*ENGINE_SECTIONS, TalkConfig, chat.ChatConfig),
    "complete": (*ENGINE_SECTIONS, TalkConfig),
    "top": (top.TopConfig,),
    "profile": (*ENGINE_SECTIONS, profile.ProfileConfig, report.ReportConfig),
    "bench serve": (*SERVING, serve.DetailConfig),
    "bench sweep": (*SERVING, sweep.SweepConfig),
    "bench compare": (compare.CompareConfig,),
    "bench plot": (plot.PlotConfig,),
    "bench throughput": (*ENGINE_SECTIONS, throughput.ThroughputConfig, workload.WorkloadConfig, report.ReportConfig),
    "bench latency": (*ENGINE_SECTIONS, latency.LatencyConfig, report.ReportConfig),
    "bench startup": (*ENGINE_SECTIONS, startup.StartupConfig, report.ReportConfig),
}


def options_of(command: str) -> set[str]:
    return {field.name for section in SECTIONS_OF[command] for field in dataclasses.fields(section)}


def flaws_of_quire(line: str) -> list[str]:
    words = shlex.split(line.split(" > ")[0].split(" | ")[0].rstrip("&"), comments=True)
    words = words[next(i for i, word in enumerate(words) if word.endswith("quire")) + 1 :]
    if not words or words[0].startswith("-"):
        return []
    name = words[0]
    if name not in main.COMMANDS:
        return [] if name.isupper() else [f"there is no command {name!r}"]
    if name == "bench" and len(words) > 1:
        name = f"bench {words[1]}"
        if words[1] not in bench_main.KINDS:
            return [f"there is no {name!r}"]
    flags = [word.partition("=")[0].partition(".")[0] for word in words if re.match(r"--?[a-z]", word)]
    if name not in SECTIONS_OF:
        source = Path(importlib.util.find_spec(main.COMMANDS[name][0]).origin or "").read_text("utf-8")  # type: ignore[union-attr]
        return [f"{name}: {flag}" for flag in flags if flag.lstrip("-").replace("-", "_") not in source]
    known = options_of(name) | ALIASES.keys() | {"config", "help"}
    return [
        f"{name} has no {flag}"
        for flag in flags
        if flag not in SHORT
        and flag.removeprefix("--").replace("-", "_") not in known
        and flag.removeprefix("--no-").replace("-", "_") not in known
    ]


ROUTER = ROOT / "quire" / "router" / "app.py"


@cache
def routes() -> set[str]:
    routers = (*ROUTERS, adapters.router, development.router, profiling.router)
    return {route.path for router in routers for route in router.routes}  # type: ignore[attr-defined]


def flaws_of_curl(line: str) -> list[str]:
    words = shlex.split(line)
    found = []
    for word in words:
        if match := re.match(r"https?://[^/]+(/[^?]*)", word):
            patterns = (re.sub(r"\{[^}]*\}", "[^/]+", path) for path in routes())
            own = match[1].startswith("/router/") and f'"{match[1]}"' in ROUTER.read_text("utf-8")
            if not own and not any(re.fullmatch(pattern, match[1]) for pattern in patterns):
                found.append(f"there is no route {match[1]}")
    for flag, value in itertools.pairwise(words):
        if flag in ("-d", "--data") and not value.startswith("@"):
            try:
                json.loads(value)
            except ValueError as error:
                found.append(f"the body is not JSON: {error}")
    return found


def flaws_of_others(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    found = []
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        found += [f"make has no {word}" for word in words[1:] if word.isidentifier() and word not in targets]
    found += [f"there is no {word}" for word in words if word.startswith("deploy/") and not (ROOT / word).exists()]
    if "-m" in words and "python" in words[0]:
        module = words[words.index("-m") + 1]
        if importlib.util.find_spec(module) is None:
            found.append(f"there is no module {module}")
    return found


@pytest.mark.parametrize("block", [block for block in ALL if is_shell(block)], ids=str)
def test_commands_could_be_typed(block: Block) -> None:
    text = re.sub(r"\s#\s.*$", "", "\n".join(commands(block)), flags=re.MULTILINE)  # remarks may have apostrophes
    found = []
    # A quoted body may have lines of its own.
    for line in re.split(r"\n(?=(?:[^']*'[^']*')*[^']*$)", text):
        if COMMAND.match(line + " "):
            found += flaws_of_quire(line)
        elif line.startswith("curl"):
            found += flaws_of_curl(line)
        else:
            found += flaws_of_others(line)
    assert found == []


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "python"], ids=str)
def test_programs_could_be_run(block: Block) -> None:
    text = block.text.replace(" …,", "")  # something of the kind is left out
    tree = compile(text, str(block), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    imported = {
        name.asname or name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if "from quire import" in text:  # else it goes on with a program above it
        assert used & set(quire.__all__) <= imported
    keywords = {field.name for cls in SECTIONS.values() for field in dataclasses.fields(cls)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "quire":
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("LLM", "EngineArgs"):
            assert {word.arg for word in node.keywords if word.arg} <= keywords, ast.unparse(node)


def test_there_is_something_to_check() -> None:
    assert sum(map(is_shell, ALL)) > 20
    assert sum(block.language == "python" for block in ALL) > 15
    assert quire.__version__
