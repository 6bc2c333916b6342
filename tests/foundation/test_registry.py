from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from quire.foundation import registry
from quire.foundation.errors import ConfigError
from quire.foundation.registry import Registry, load


def test_load_finds_objects_and_parts_of_them() -> None:
    assert load("json:dumps")([1]) == "[1]"
    assert load("collections:OrderedDict.fromkeys") is not None
    assert load("json").__name__ == "json"


@pytest.mark.parametrize("target", ["no_such_package:X", "json.nothing:X", "json:nothing", "json:dumps.nothing"])
def test_load_says_what_is_not_there(target: str) -> None:
    with pytest.raises(ConfigError, match=r"no_such_package|nothing"):
        load(target)


def test_an_import_error_inside_a_module_is_not_hidden(tmp_path, monkeypatch) -> None:
    (tmp_path / "leaf_with_bad_import.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load("leaf_with_bad_import:X")


def test_unknown_names_get_the_nearest_and_all_known_ones() -> None:
    colours = Registry("colour", {"red": "json:dumps", "green": "json:loads"})
    with pytest.raises(ConfigError, match=r"unknown colour 'gren'; did you mean 'green'\? \(known: red, green\)"):
        colours.get("gren")


def test_plugins_extend_but_do_not_replace(monkeypatch) -> None:
    points = [
        EntryPoint("blue", "json:loads", "quire.warm_colour"),
        EntryPoint("red", "json:loads", "quire.warm_colour"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "quire.warm_colour" else [])
    colours = Registry("warm colour", {"red": "json:dumps"})
    assert list(colours) == ["red", "blue"]
    assert colours.get("blue") is load("json:loads")
    assert colours.get("red") is load("json:dumps")


def test_the_core_never_imports_torch() -> None:
    modules = "quire.engine.process, quire.engine.client, quire.executor.multiproc"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
