"""The laws of the house: no import upwards, no cycle, no torch in the brain. Lazy imports count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "quire"

# Rooms by floor. A file imports from lower floors and from its own room only.
FLOORS: list[list[str]] = [
    ["foundation"],
    ["types"],
    ["config", "grammar", "observe", "kv", "scheduling"],
    ["distributed", "platforms"],
    ["kernels"],
    ["attention", "quantization"],
    ["layers"],
    ["models"],
    ["worker"],
    ["executor"],
    ["engine"],
    ["frontend"],
    ["server", "cli", "llm"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# Rooms of one floor that may lean on a neighbour, in this direction only.
NEIGHBOURS = {("scheduling", "kv"), ("cli", "server"), ("cli", "llm")}
BRAIN = [
    "types",
    "config",
    "grammar",
    "observe",
    "kv",
    "scheduling",
    "executor",
    "engine",
    "frontend",
    "server",
    "foundation",
]
# The executor reaches the worker by name; the worker's own process is where the muscle is imported.
HEAVY = {"torch", "triton", "transformers", "safetensors"}
# Libraries that bring torch along: each in one file, which is imported by name once somebody chooses it.
BRINGS_TORCH = {"xgrammar": "grammar/xgrammar.py"}


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return parts[0]


def imports(file: Path) -> Iterator[str]:
    """Full names of all imported modules, wherever in the file they are imported."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", files(), ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_only_from_lower_floors(file: Path) -> None:
    room = room_of(file)
    if room == "__init__":
        return  # the lazy front door names what it exports
    assert room in FLOOR, f"{room} has no floor"
    for name in imports(file):
        if not name.startswith("quire."):
            continue
        other = name.split(".")[1]
        if other in ("__version__", room):
            continue
        allowed = FLOOR[other] < FLOOR[room] or (room, other) in NEIGHBOURS
        assert allowed, f"{file.relative_to(ROOT)} (floor {FLOOR[room]}) imports {name} (floor {FLOOR[other]})"


@pytest.mark.parametrize("room", BRAIN)
def test_no_torch_in_the_brain(room: str) -> None:
    for file in (ROOT / room).rglob("*.py"):
        found = {name.split(".")[0] for name in imports(file)} & HEAVY
        assert not found, f"{file.relative_to(ROOT)} imports {found}"


def test_what_brings_torch_is_imported_by_one_file_that_nobody_imports() -> None:
    for file in files():
        found = set(imports(file))
        for library, home in BRINGS_TORCH.items():
            if file != ROOT / home:
                assert library not in {name.split(".")[0] for name in found}, file
                module = "quire." + home.removesuffix(".py").replace("/", ".")
                assert not any(name == module or name.startswith(f"{module}.") for name in found), file


def test_no_cycle_between_files() -> None:
    """Depth-first search over the graph of all imports, lazy and TYPE_CHECKING ones included."""
    module = {
        ".".join(("quire", *f.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): f for f in files()
    }
    graph: dict[str, set[str]] = {}
    for name, file in module.items():
        targets = set()
        for imported in imports(file):
            target = imported if imported in module else imported.rpartition(".")[0]
            if target in module and target not in (name, "quire"):
                targets.add(target)
        graph[name] = targets if name != "quire" else set()
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> None:
        assert name not in path, "cycle: " + " → ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for target in sorted(graph[name]):
            visit(target)
        path.pop()
        done.add(name)

    for name in sorted(graph):
        visit(name)


@pytest.mark.parametrize("file", files(), ids=lambda f: str(f.relative_to(ROOT)))
def test_no_file_is_too_long(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 800, "one concept a file"


@pytest.mark.parametrize("file", files(), ids=lambda f: str(f.relative_to(ROOT)))
def test_no_object_deserialiser_and_no_eval(file: Path) -> None:
    """Weights, frames and configs are data: nothing that comes in may become code."""
    for name in imports(file):
        assert name.split(".")[0] not in {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, name
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, f"line {node.lineno}"
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                called = f"{node.func.value.id}.{node.func.attr}"
                assert called not in {"torch.load", "pickle.loads"}, f"line {node.lineno}"
