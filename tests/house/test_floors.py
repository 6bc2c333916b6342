"""The laws of the house: no import upwards, no cycle, no torch in the brain. Lazy imports count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "quire"

# Rooms by floor. A file imports from lower floors and from its own room only.
FLOORS: list[list[str]] = [
    ["foundation"],
    ["types", "conversion"],
    ["config", "grammar", "observe", "kv", "scheduling"],
    ["distributed", "platforms", "parsers"],
    ["kernels"],
    ["attention", "quantization"],
    ["layers"],
    ["models"],
    ["worker"],
    ["executor"],
    ["engine"],
    ["frontend"],
    ["server", "router", "simulation", "cli", "llm", "ray"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# Rooms of one floor that may lean on a neighbour, in this direction only.
NEIGHBOURS = {
    ("scheduling", "kv"),
    ("distributed", "platforms"),
    ("cli", "server"),
    ("cli", "router"),
    ("cli", "simulation"),
    ("ray", "llm"),
    ("cli", "llm"),
}
BRAIN = [
    "types",
    "config",
    "grammar",
    "observe",
    "kv",
    "scheduling",
    "parsers",
    "executor",
    "engine",
    "frontend",
    "server",
    "foundation",
]
# The executor reaches the worker by name; the worker's own process is where the muscle is imported.
HEAVY = {"torch", "triton", "transformers", "safetensors"}
# Libraries that bring torch along: each in one file, which is imported by name once somebody chooses it.
BRINGS_TORCH = {"xgrammar": "grammar/xgrammar/backend.py"}


@cache
def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def room_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return parts[0]


@cache
def imports(file: Path) -> list[str]:
    """Full names of all imported modules, wherever in the file they are imported."""
    found: list[str] = []
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def upward_imports(file: Path) -> Iterator[str]:
    room = room_of(file)
    for name in imports(file):
        if not name.startswith("quire."):
            continue
        other = name.split(".")[1]
        if other in ("__version__", room):
            continue
        if FLOOR[other] >= FLOOR[room] and (room, other) not in NEIGHBOURS:
            yield f"{file.relative_to(ROOT)} (floor {FLOOR[room]}) imports {name} (floor {FLOOR[other]})"


def test_imports_only_from_lower_floors() -> None:
    rooms = {room_of(file) for file in files()} - {"__init__"}  # the lazy front door names what it exports
    assert not rooms - FLOOR.keys(), "rooms without a floor"
    assert [flaw for file in files() if room_of(file) != "__init__" for flaw in upward_imports(file)] == []


def test_no_torch_in_the_brain() -> None:
    for file in files():
        found = {name.split(".")[0] for name in imports(file)} & HEAVY
        assert room_of(file) not in BRAIN or not found, f"{file.relative_to(ROOT)} imports {found}"


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


def test_no_file_is_too_long() -> None:
    long = [file for file in files() if len(file.read_text(encoding="utf-8").splitlines()) > 800]
    assert long == [], "one concept a file"


def calls(file: Path) -> Iterator[tuple[str, int]]:
    """What is called by its name, or as a module's, and in which line."""
    for node in ast.walk(tree(file)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            yield node.func.id, node.lineno
        elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            yield f"{node.func.value.id}.{node.func.attr}", node.lineno


def test_no_object_deserialiser_and_no_eval() -> None:
    """Weights, frames and configs are data: nothing that comes in may become code."""
    for file in files():
        found = {name.split(".")[0] for name in imports(file)}
        assert not found & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, file
        for name, line in calls(file):
            assert name not in {"eval", "exec", "torch.load", "pickle.loads"} or is_restricted(file, name), (
                f"{file}, line {line}"
            )


def is_restricted(file: Path, name: str) -> bool:
    """The one place that reads files of torch's form, with the reader that builds tensors and nothing else."""
    home = name == "torch.load" and file == ROOT / "conversion" / "torch_file.py"
    return home and all(
        any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    )
