"""Prints the versions of what Quire with all that its tests need is installed with: `make lock`.

Only what follows from pyproject.toml, whatever else lies in the environment.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = "quire[test,docs]"


def main() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    pending = [(Requirement(text), "") for text in (*project["dependencies"], EXTRAS)]
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    for requirement, extra in pending:  # which grows meanwhile
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if name == "quire":
            own = [text for wanted in requirement.extras for text in project["optional-dependencies"][wanted]]
            pending += [(Requirement(text), "") for text in own]
            continue
        for wanted in ("", *requirement.extras):
            if (name, wanted) in seen:
                continue
            seen.add((name, wanted))
            try:
                found = distribution(name)
            except PackageNotFoundError:
                raise SystemExit(f"{name} is not installed: install it, then lock") from None
            versions[name] = found.version.partition("+")[0]
            pending += [(Requirement(text), wanted) for text in found.requires or ()]
    print("# The versions that the tests were last run with, for `pip install -r requirements-dev.lock`: `make lock`.")
    print("\n".join(f"{name}=={version}" for name, version in sorted(versions.items())))


if __name__ == "__main__":
    main()
