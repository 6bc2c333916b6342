#!/usr/bin/env bash
# Makes what a release consists of in dist/, after checks: deploy/release.sh [--check]
# --check: the checks that need no built package and no tests. Nothing is uploaded or tagged; the last lines say how.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
problems=0
say() { echo "release: $*" >&2; problems=$((problems + 1)); }

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' quire/__init__.py)
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?$ ]] || say "quire.__version__ is '$version', which is no version to release"
grep -q "^## $version" CHANGELOG.md || say "CHANGELOG.md has no section '## $version'"
if sed -n '/^## Unreleased/,/^## [0-9]/p' CHANGELOG.md | grep -q '^- '; then
    say "CHANGELOG.md has lines under Unreleased: they belong to $version"
fi
for name in version appVersion; do
    grep -Eq "^$name: \"?$version\"?$" deploy/helm/quire/Chart.yaml || say "deploy/helm/quire/Chart.yaml: $name is not $version"
done
if grep -q 'quire\.example' pyproject.toml deploy/helm/quire/Chart.yaml deploy/systemd/quire.service mkdocs.yml; then
    say "addresses are still examples (quire.example): pyproject.toml, mkdocs.yml, deploy/"
fi
[[ -z $(git status --porcelain) ]] || say "the working tree has changes"
git rev-parse -q --verify "refs/tags/v$version" >/dev/null && say "the tag v$version is there already"
"$python" docs/generate.py --check || say "generated files are out of date"
((problems == 0)) || { echo "release: $problems problems, nothing was made" >&2; exit 1; }
[[ ${1:-} == --check ]] && { echo "release: $version may be made"; exit 0; }

.ci/run
rm -rf dist
"$python" -m build --outdir dist .
"$python" -m pytest -q -m long tests/packaging
(cd dist && sha256sum -- * > SHA256SUMS)
cat <<END
release: $version is in dist/. To publish it:
  git tag -s v$version -m "Quire $version" && git push origin v$version
  upload dist/*.whl and dist/*.tar.gz with twine
  docker build -f deploy/docker/Dockerfile --target cuda -t quire:$version .
  helm package deploy/helm/quire
END
