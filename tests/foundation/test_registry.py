from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from quire.foundation.errors import ConfigError
from quire.foundation.registry import Registry, installed_plugins, load
from tests.foundation.packages import install

Install = Callable[..., None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package for this test: name, points of the group `quire.warm_colour`, modules."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(package: str, points: Mapping[str, str], **modules: str) -> None:
        install(tmp_path, package, {"quire.warm_colour": points}, **modules)
        installed_plugins.cache_clear()

    installed_plugins.cache_clear()
    yield add
    installed_plugins.cache_clear()


def colours(**more: object) -> Registry:
    return Registry("warm colour", {"red": "json:dumps"}, **more)  # type: ignore[arg-type]


def test_load_finds_objects_and_parts_of_them() -> None:
    assert load("json:dumps")([1]) == "[1]"
    assert load("collections:OrderedDict.fromkeys") is not None
    assert load("json").__name__ == "json"


@pytest.mark.parametrize("target", ["no_such_package:X", "json.nothing:X", "json:nothing", "json:dumps.nothing"])
def test_load_says_what_is_not_there(target: str) -> None:
    with pytest.raises(ConfigError, match=r"no_such_package|nothing"):
        load(target)


def test_an_import_error_inside_a_module_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaf_with_bad_import.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load("leaf_with_bad_import:X")


def test_unknown_names_get_the_nearest_and_all_known_ones() -> None:
    some = Registry("colour", {"red": "json:dumps", "green": "json:loads"})
    with pytest.raises(ConfigError, match=r"unknown colour 'gren'; did you mean 'green'\? \(known: red, green\)"):
        some.get("gren")


def test_installed_packages_add_names(installed: Install) -> None:
    installed("paint-shop", {"blue": "paint_shop:BLUE [extra]"}, paint_shop="BLUE = 3")
    found = colours()
    assert list(found) == ["red", "blue"]
    assert found.get("blue") == 3
    assert found.get("red") is load("json:dumps")
    with pytest.raises(ConfigError, match="known: red, blue"):
        found.check("green")
    with pytest.raises(ConfigError, match="registered already"):
        found.register("blue", 4)


def test_a_name_of_ours_stays_ours_and_that_is_said(installed: Install, caplog: pytest.LogCaptureFixture) -> None:
    installed("paint-shop", {"red": "paint_shop:RED"}, paint_shop="1 / 0")
    for _ in range(2):
        assert colours().get("red") is load("json:dumps")
    told = "paint_shop:RED of the package paint-shop (entry point red of the group quire.warm_colour) is not used"
    assert told in caplog.text


def test_two_packages_of_one_name_are_refused_when_it_is_asked_for(installed: Install) -> None:
    installed("paint-shop", {"blue": "paint_shop:BLUE"}, paint_shop="BLUE = 3")
    installed("other-shop", {"blue": "other_shop:BLUE", "pink": "other_shop:BLUE"}, other_shop="BLUE = 4")
    found = colours()
    assert found.get("pink") == 4
    with pytest.raises(ConfigError, match=r"two things: .*(paint-shop|other-shop).* and .*shop.*uninstall one") as told:
        found.get("blue", "paint")
    assert told.value.field == "paint"


@pytest.mark.parametrize(
    ("target", "source", "words"),
    [
        ("paint_shop:BLUE", "1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("paint_shop:BLUE", "import pigments", "cannot be imported: ModuleNotFoundError: No module named 'pigments'"),
        ("paint_shop:BLUE", "blue =", "cannot be imported: SyntaxError"),
        ("paint_shop:BLUE", "", "cannot be imported: 'paint_shop:BLUE': module 'paint_shop' has no 'BLUE'"),
        ("paint_shoe:BLUE", "", "cannot be imported: 'paint_shoe:BLUE': there is no module 'paint_shoe'"),
        ("paint_shop:BLUE", "BLUE = 3", "is no warm colour: it must be a class, and is an object of type int"),
        ("paint_shop:BLUE", "class BLUE: ...", r"the class BLUE lacks mix, hue \(see paints.Colour\)"),
        ("paint_shop:BLUE", "class BLUE:\n    hue = 3", "the class BLUE lacks mix"),
    ],
)
def test_what_is_wrong_with_a_plugin_is_one_error_for_who_asks(
    installed: Install, monkeypatch: pytest.MonkeyPatch, target: str, source: str, words: str
) -> None:
    installed("paint-shop", {"blue": target}, paint_shop=source)
    monkeypatch.delitem(sys.modules, "paint_shop", raising=False)
    found = colours(contract="paints:Colour", needs=("mix", "hue"), is_class=True)
    assert found.get("red") is load("json:dumps"), "who does not ask for it has no harm"
    with pytest.raises(ConfigError, match=words) as told:
        found.get("blue", "paint")
    assert f"{target} of the package paint-shop (entry point blue of the group quire.warm_colour)" in str(told.value)
    assert told.value.field == "paint"
    monkeypatch.delitem(sys.modules, "paint_shop", raising=False)


def test_paths_and_classes_are_names_where_a_registry_takes_them() -> None:
    class Mine:
        mix = None

    found = colours(needs=("mix",), is_class=True, takes_paths=True)
    name = found.name_of(Mine)
    assert found.name_of(name) == name
    assert found.get(name) is Mine
    with pytest.raises(ConfigError, match="'json:JSONDecoder' is no warm colour: the class JSONDecoder lacks mix"):
        found.get("json:JSONDecoder")
    with pytest.raises(ConfigError, match="must hold classes or names of classes, got 3"):
        found.name_of(3)
    with pytest.raises(ConfigError, match="unknown warm colour 'json:JSONDecoder'"):
        colours().get("json:JSONDecoder")


def test_the_core_never_imports_torch() -> None:
    modules = "quire.engine.process, quire.engine.client, quire.executor.multiproc"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
