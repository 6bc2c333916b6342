"""A flag exists once: in the config. Here is what the command line and the YAML file make of it."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from quire.cli import options
from quire.cli.bench.client import ServeBenchConfig
from quire.cli.talk import TalkConfig
from quire.config import sglang
from quire.config.engine import SECTIONS, EngineConfig
from quire.config.serve import ServeConfig
from quire.config.unsupported import SHORT, UNSUPPORTED
from quire.foundation.errors import ConfigError

ALL = (*options.ENGINE_SECTIONS, ServeConfig)


def parse(*arguments: str) -> dict[str, Any]:
    return options.parse("serve", "about", arguments, ALL, positional=("model",))


def test_no_arguments_are_the_defaults() -> None:
    values = parse()
    for section in ALL:
        default = section()
        for field in dataclasses.fields(section):
            assert values[field.name] == getattr(default, field.name), field.name


@pytest.mark.parametrize("section", ALL)
def test_every_option_has_its_help(section: type) -> None:
    assert set(options.field_docs(section)) == {field.name for field in dataclasses.fields(section)}


def test_no_name_is_used_twice() -> None:
    names = [field.name for section in (*SECTIONS.values(), ServeConfig) for field in dataclasses.fields(section)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["some/model"], "model", "some/model"),
        (["--port", "1", "--api-key", "a", "b", "--model", "some/model"], "model", "some/model"),
        (["m", "--served-model-name", "a/b", "c/d"], "served_model_name", ["a/b", "c/d"]),
        (["--lora-modules", "a=/b", '{"name": "c", "path": "/d"}'], "port", 8000),
        (["--allowed-origins", "http://a", "http://b/"], "allowed_origins", ["http://a", "http://b/"]),
        (["--model=some/model", "--port", "1"], "port", 1),
        (["-sc.method", "ngram", "-sc.x=2"], "speculative_config", {"method": "ngram", "x": 2}),
        (["--max-model-len", "4096"], "max_model_len", 4096),
        (["--max_model_len", "4K"], "max_model_len", 4096),
        (["--max-model-len=4k"], "max_model_len", 4000),
        (["--max-model-len", "auto"], "max_model_len", None),
        (["--kv-cache-memory-bytes", "1.5G"], "kv_cache_memory_bytes", 3 * 2**29),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--api-key", "a", "b"], "api_key", ["a", "b"]),
        (["--hf-overrides", '{"a": {"b": [1]}}'], "hf_overrides", {"a": {"b": [1]}}),
        (["--hf-overrides.a=[1]", "--hf_overrides.b", "x.y"], "hf_overrides", {"a": [1], "b": "x.y"}),
        (["--hf-overrides", '{"a": 1}', "--hf-overrides.b", "2"], "hf_overrides", {"a": 1, "b": 2}),
        (["--hf-overrides.a.b", "2", "--hf-overrides.a.c=d"], "hf_overrides", {"a": {"b": 2, "c": "d"}}),
        (
            ["--hf-overrides", '{"a": {"b": 1, "c": 1}}', "--hf-overrides.a.b", "2"],
            "hf_overrides",
            {"a": {"b": 2, "c": 1}},
        ),
        (["--hf-overrides.a.b+", "2", "--hf-overrides.a.b+=c"], "hf_overrides", {"a": {"b": [2, "c"]}}),
        (["--structured-outputs-config.backend", "xgrammar"], "structured_outputs_config", {"backend": "xgrammar"}),
        (["--cuda-graph-sizes", "1", "2"], "cuda_graph_sizes", [1, 2]),
        (["--dtype", "float16"], "dtype", "float16"),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--tokenizer", "folder"], "tokenizer", "folder"),
        (["--async-scheduling", "False"], "async_scheduling", False),
        (["--async-scheduling=true"], "async_scheduling", True),
        (["--no-async-scheduling"], "async_scheduling", False),
        (["--enable-prefix-caching", "--seed", "3"], "enable_prefix_caching", True),
        (["m", "--port", "1", "--host", "::1"], "host", "::1"),
    ],
)
def test_flags(arguments: list[str], name: str, value: Any) -> None:
    assert parse(*arguments)[name] == value


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-model-lens", "4"], "--max-model-len"),
        (["--port", "x"], "whole number"),
        (["--port", "1.5"], "whole number"),
        (["--dtype", "float8"], "bfloat16"),
        (["--hf-overrides", "[1]"], "JSON object"),
        (["--gpu-memory-utilization", "half"], "gpu-memory-utilization"),
        (["one", "two"], "no option takes this: two"),
        (["one", "--model", "two"], "no option takes this: one"),
        (["--model"], "--model needs a value"),
        (["--model", "--port", "1"], "--model needs a value"),
        (["-O.level=3"], "-O: optimization_level is not supported"),
        (["--nonsense", "1"], "there is no option --nonsense"),
        (["--enable-prefix-cachin"], "--enable-prefix-caching"),
        (["--api-key", "secret", "owner/model", "--port", "1"], "--api-key takes all words up to the next option"),
        (["--port", "1", "--served-model-name", "a", "./folder"], "before the options, or with --model"),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "2"], "--hf-overrides.a.b lies inside"),
        (["--hf-overrides.a", "1", "--hf-overrides.a+", "2"], "--hf-overrides.a+ lies inside"),
    ],
)
def test_a_wrong_flag_says_what_is_right(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse(*arguments)


FIELDS = {field.name: (section, field) for section in ALL for field in dataclasses.fields(section)}


@pytest.mark.parametrize("name", FIELDS)
def test_an_option_with_a_typing_error_is_named_and_nothing_else(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError) as caught:
        parse("some/model", f"{flag}s", "1")
    assert str(caught.value) == f"there is no option {flag}s; did you mean {flag}?"


SGLANG = [line.split(" | ", 1) for line in sglang.TABLE.strip().splitlines()]


@pytest.mark.parametrize(("theirs", "ours"), SGLANG)
def test_what_sglang_calls_otherwise_is_told_as_it_is_called_here(theirs: str, ours: str) -> None:
    for flag in theirs.split(", "):
        name = flag.split()[0].removeprefix("--").replace("-", "_")
        if name == "model":
            continue
        if name in FIELDS:
            assert not ours.startswith(sglang.NONE), f"{flag}: there is one"
            continue
        with pytest.raises(ConfigError) as caught:
            parse("some/model", flag.split()[0], "1")
        assert name in UNSUPPORTED or ours.removeprefix(sglang.NONE) in str(caught.value)
        assert caught.value.code == "foreign-option"


LISTS = [n for n, (section, _) in FIELDS.items() if typing.get_origin(typing.get_type_hints(section)[n]) is list]


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("rest", [[], ["--port", "1"], [""], ["[]"]])
def test_a_list_that_is_named_must_be_given(name: str, rest: list[str]) -> None:
    """An empty list of keys would be an open server."""
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} needs a value"):
        parse("some/model", flag, *rest)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_may_be_json_and_comes_once(name: str) -> None:
    """As vLLM has it: --allowed-origins '["*"]'. Of two the first would be lost, and with it a key."""
    flag = "--" + name.replace("_", "-")
    wanted = parse("some/model", flag, "1", "2", "--port", "1")
    assert [str(value) for value in wanted[name]] == ["1", "2"]
    assert parse("some/model", flag, '["1", "2"]', "--port", "1") == wanted
    assert parse("some/model", "--port", "1", f'{flag}=["1", "2"]') == wanted
    with pytest.raises(ConfigError, match=f"{flag} is given twice"):
        parse("some/model", flag, "1", "--port", "1", f"{flag}=2")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_others_have_and_we_do_not_is_refused_by_name(name: str, tmp_path: Path) -> None:
    assert name not in FIELDS, "it is an option now: take it off the list"
    flag = "--" + name.replace("_", "-")
    for arguments in ([flag], [flag, "4"], [f"{flag}=4"], [f"--no-{flag[2:]}"], [f"--{name}"], [f"{flag}.key", "1"]):
        with pytest.raises(ConfigError, match=f"{name} is not supported: "):
            parse("some/model", *arguments)
    with pytest.raises(ConfigError, match=f"{name} is not supported: "):
        EngineConfig.from_flat(**{name: 1})
    file = tmp_path / "config.yaml"
    file.write_text(f"{name}: 1\n")
    with pytest.raises(ConfigError, match=f"config.yaml: {name} is not supported: "):
        parse("--config", str(file))


@pytest.mark.parametrize("flag", SHORT)
def test_short_flags_are_known(flag: str) -> None:
    if SHORT[flag] == "speculative_config":
        given = '{"method": "ngram", "num_speculative_tokens": 2}'
        assert parse(flag, given)[SHORT[flag]] == {"method": "ngram", "num_speculative_tokens": 2}
    elif SHORT[flag] in FIELDS:
        assert parse(flag, "1")[SHORT[flag]] in (1, "1")
    else:
        with pytest.raises(ConfigError, match=f"{flag}: {SHORT[flag]} is not supported"):
            parse(flag, "1")


@pytest.mark.parametrize("section", [TalkConfig, ServeBenchConfig])
def test_a_server_is_named_the_same_way_everywhere(section: type, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for key in ("url", "base_url"):
        file.write_text(f"{key}: http://a\n")
        for arguments in (["--" + key, "http://a"], [f"--{key.replace('_', '-')}=http://a"], ["--config", str(file)]):
            assert options.parse("x", "about", arguments, (section,))["url"] == "http://a"


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def test_a_file_holds_the_same_options_and_the_command_line_wins(yaml_file: Path) -> None:
    yaml_file.write_text(
        "model: from/file\nmax-model-len: 4K\nport: 9000\napi_key: [a, b]\nhf_overrides: {x: 1}\n"
        "enable_prefix_caching: false\nseed: 3\nshutdown_timeout: 5\ndownload_dir: null\nserved-model-name: one\n"
    )
    values = parse("--config", str(yaml_file), "--seed", "4")
    assert values["model"] == "from/file"
    assert values["max_model_len"] == 4096
    assert (values["port"], values["seed"], values["shutdown_timeout"]) == (9000, 4, 5.0)
    assert (values["api_key"], values["hf_overrides"]) == (["a", "b"], {"x": 1})
    assert values["served_model_name"] == ["one"]
    assert values["enable_prefix_caching"] is False
    assert parse(f"--config={yaml_file}", "from/line")["model"] == "from/line"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_model_lenn: 3", "did you mean 'max_model_len'"),
        ("port: x", "port"),
        ("port: [1]", "port"),
        ("dtype: float8", "dtype"),
        ("enable_prefix_caching: 'yes'", "enable_prefix_caching"),
        ("hf_overrides: 3", "hf_overrides"),
        ("- a", "mapping"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(yaml_file: Path, text: str, says: str) -> None:
    yaml_file.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml") as error:
        parse("--config", str(yaml_file))
    assert says in str(error.value)


def test_a_missing_file_and_two_files_are_errors(yaml_file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parse("--config", str(yaml_file))
    with pytest.raises(ConfigError, match="once"):
        parse("--config", "a", "--config", "b")


def test_the_parsed_values_make_the_config() -> None:
    values = parse("m", "--max-num-seqs", "3", "--debug", "--port", "7")
    config = options.engine_config(values)
    assert (config.model.model, config.schedule.max_num_seqs, config.runtime.debug) == ("m", 3, True)
    assert options.section_of(ServeConfig, values).port == 7


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("-1", -1), ("1_000", 1000), ("25.6k", 25600), ("2M", 2**21)])
def test_sizes(text: str, number: int) -> None:
    assert options.parse_size(text) == number


def test_a_long_number_stays_exact() -> None:
    assert options.parse_size("9007199254740993") == 9007199254740993


@pytest.mark.parametrize("text", ["", "k", "1.5", "1e3", "0x10", "1kk", "1.00001k"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        options.parse_size(text)
