"""What is under deploy/: read as what will read it, and linted where the linter is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import quire
from quire.cli.options import ENGINE_SECTIONS
from quire.config.options import option_types
from quire.config.serve import ServeConfig
from quire.server.app import ROUTERS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "quire"
ROUTES = {route.path for router in ROUTERS for route in router.routes}  # type: ignore[attr-defined]
OPTIONS = {name for section in (*ENGINE_SECTIONS, ServeConfig) for name in option_types(section)}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env=environment)


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text("utf-8"))
    return found


def test_the_dockerfile_is_of_a_user_with_a_health_check() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text("utf-8")
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    assert {"cpu", "cuda"} <= stages
    assert re.findall(r"^USER (\w+)$", text, re.MULTILINE)[-1] == "1000"
    assert re.search(r"HEALTHCHECK [^\n]*\\\n\s+CMD .*/health'", text)
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for part in source.split():
            assert (ROOT / part).exists(), part
            assert f"!{part.removeprefix('./').rstrip('/')}" in (ROOT / ".dockerignore").read_text("utf-8").splitlines()


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing() -> None:
    done = run("hadolint", "deploy/docker/Dockerfile")
    assert done.returncode == 0, done.stdout


def test_compose_names_what_is_there() -> None:
    services, named = compose()["services"], compose()["volumes"]
    assert services.keys() == {"quire", "prometheus", "grafana"}
    assert services["quire"]["build"]["dockerfile"] == "deploy/docker/Dockerfile"
    for name, service in services.items():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in named or source.startswith("../"), (name, volume)
    scraped = yaml.safe_load(compose()["configs"]["prometheus"]["content"])["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == ["quire:8000"]


@pytest.mark.skipif(
    shutil.which("docker") is None or run("docker", "compose", "version").returncode != 0,
    reason="docker compose is not installed",
)
def test_compose_is_what_compose_reads() -> None:
    done = run("docker", "compose", "-f", "deploy/docker/compose.yaml", "config", "--quiet", QUIRE_API_KEY="x")
    assert done.returncode == 0, done.stderr


def test_probes_and_options_of_the_chart_exist() -> None:
    text = "".join(file.read_text("utf-8") for file in (CHART / "templates").iterdir())
    assert set(re.findall(r"httpGet: \{path: ([^,]+),", text)) == {"/startupz", "/readyz", "/livez"}
    assert set(re.findall(r"httpGet: \{path: ([^,]+),", text)) <= ROUTES
    config = (CHART / "templates" / "config.yaml").read_text("utf-8")
    written = re.findall(r'(?:set \$own|dict) "(\w+)"|"(\w+)" (?:\.Values|"0|8000|\d)', config)
    names = {one or other for one, other in written}
    assert {"model", "host", "port", "shutdown_timeout", "api_key_file", "tensor_parallel_size"} <= names
    assert names <= OPTIONS
    used = set(re.findall(r"\.Values\.(\w+)", text))
    assert used == yaml.safe_load((CHART / "values.yaml").read_text("utf-8")).keys()
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["version"] == chart["appVersion"] == quire.__version__


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
def test_helm_finds_nothing() -> None:
    assert run("helm", "lint", "--strict", str(CHART)).returncode == 0
    assert run("helm", "template", str(CHART), "--set", "gpus=2", "--set", "ingress.enabled=true").returncode != 0
    done = run("helm", "template", str(CHART), "--set", "gpus=2,replicas=2,autoscaling.enabled=true")
    assert done.returncode == 0, done.stderr
    kinds = [one["kind"] for one in yaml.safe_load_all(done.stdout) if one]
    assert {"Deployment", "Service", "ConfigMap", "HorizontalPodAutoscaler", "PodDisruptionBudget"} <= set(kinds)


def test_the_unit_restarts_what_may_get_better() -> None:
    unit = (DEPLOY / "systemd" / "quire.service").read_text("utf-8")
    assert "RestartPreventExitStatus=2 3" in unit
    assert "serve --config /etc/quire/config.yaml" in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    """With a program that is there: else that alone is wrong with it."""
    unit = (DEPLOY / "systemd" / "quire.service").read_text("utf-8")
    (tmp_path / "quire.service").write_text(unit.replace("/opt/quire/bin/quire", "/bin/true"))
    done = run("systemd-analyze", "verify", str(tmp_path / "quire.service"))
    assert done.returncode == 0, done.stderr
    assert "quire.service" not in done.stderr


def test_a_release_says_what_is_missing() -> None:
    """As of a version that was not prepared: the addresses are examples, and lines stand under Unreleased."""
    done = run("deploy/release.sh", "--check", PYTHON=sys.executable)
    problems = [line for line in done.stderr.splitlines() if line.startswith("release: ")]
    assert done.returncode == (1 if problems else 0)
    if "quire.example" in (ROOT / "pyproject.toml").read_text("utf-8"):
        assert any("still examples" in problem for problem in problems)
    assert not any("Chart.yaml" in problem for problem in problems)


def test_the_lock_holds_what_the_project_asks_for() -> None:
    lines = (ROOT / "requirements-dev.lock").read_text("utf-8").splitlines()[1:]
    locked = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["test"], *extras["docs"], *extras["bench"]):
        wanted = Requirement(text)
        if wanted.name != "quire":
            name = canonicalize_name(wanted.name)
            assert name in locked, f"{name}: run `make lock`"
            assert wanted.specifier.contains(locked[name], prereleases=True), text
