# Everything from nothing: `make demo` and `make test` need Python >= 3.10, make, and a package index.
# They work in .venv of this folder and leave every other environment alone.
#   make demo PYTHON=python3.12                                        another Python
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu         a smaller torch, for machines without a GPU

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
PY := $(VENV)/bin/python
# make sets MAKE_TERMOUT where its output is a terminal: there pip shows its progress bar
PIP := $(PY) -m pip --disable-pip-version-check $(if $(MAKE_TERMOUT),,--quiet)

# ranks share this machine's cores; more threads than cores would make the tests slow, not fast
export OMP_NUM_THREADS := 1

# the folders of tests/, the longest first; JOBS=2 runs two side by side, for which root is needed (a /dev/shm of each
# one's own) and cores that are free: where two share what one needs, tests wait longer than they are given
SUITES := end_to_end unit chaos distributed
JOBS ?= 1
DEVICE ?= cuda:0
IN_CI := not gpu and not long and not nightly

.DEFAULT_GOAL := help
.PHONY: quick gpu chaos soak nightly help demo tour test test-all $(SUITES:%=suite-%) check format docs dev clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.installed-demo  ## train digits on this machine with unequal ranks, about a minute after the installation
	$(VENV)/bin/hetseq demo

tour: $(VENV)/.installed-dev  ## what docs/start/tour.md shows, section by section, with the time that each takes
	$(PY) -m tests.tour

quick: $(VENV)/.installed-dev  ## an answer to one change within three minutes; SINCE=COMMIT: to all since then
	$(PY) -m tests.quick $(if $(SINCE),--since $(SINCE))

test: $(VENV)/.installed-dev  ## the fast tests; P=cluster: those of tests/unit/cluster
	$(PY) -m pytest -m "not slow and not gpu and not netns and not nightly" $(if $(P),tests/unit/$(P))

# what waits leaves its core to a neighbour; what measures seconds runs by itself, when the rest has passed
test-all: $(VENV)/.installed-dev  ## the slow ones too, all that .ci/run runs; JOBS folders at a time
	$(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) --output-sync=target $(SUITES:%=suite-%)
	$(PY) -m pytest -m "alone and $(IN_CI)"

$(SUITES:%=suite-%): suite-%: $(VENV)/.installed-dev
	$(PY) -m pytest -o cache_dir=.pytest_cache/$* -m "not alone and $(IN_CI)" tests/$*

# once a day and before a release: the large sizes of what test-all runs in small ones, then the table
nightly: $(VENV)/.installed-dev  ## what .ci/run leaves out but for a GPU, and the table of figures; several hours
	$(PY) -m pytest -m "(nightly or long) and not gpu"
	$(MAKE) --no-print-directory tour
	$(MAKE) --no-print-directory gpu DEVICE=cpu
	$(MAKE) --no-print-directory chaos

chaos: $(VENV)/.installed-dev  ## the table of figures: 300 kills, every kind of fault, strangers; a quarter of an hour
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.chaos --kills 300

soak: $(VENV)/.installed-dev  ## kills for eight hours, with an eye on memory and descriptors
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.chaos --soak 28800

# ONLY="facts gloo": these sections alone
gpu: $(VENV)/.installed-dev  ## whether HetSeq works on a GPU, with the tests marked gpu; DEVICE=cpu: what needs none
	$(PY) bench/gpu_check.py --device $(DEVICE) --budget 2200 $(if $(ONLY),--only $(ONLY))

check: $(VENV)/.installed-dev  ## format, lint, types, floors, plain English
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo
	$(PY) -m pytest --quiet tests/unit/house/test_plain_english.py

format: $(VENV)/.installed-dev  ## what of `make check` can be repaired by itself
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(VENV)/.installed-dev docs/reference/options.md  ## the manual, into site/
	$(PY) -m tests.manual --write
	$(PY) -m mkdocs build --strict --quiet --site-dir site

# committed, so that it can be read without installing anything; tests/unit/config/test_options.py holds it to the code
docs/reference/options.md: hetseq/config/sections.py $(wildcard hetseq/config/*.py) tasks/options.py | $(VENV)/.installed-dev
	$(PY) -c "from hetseq.config import write_page; write_page('$@')"

dev: $(VENV)/.installed-dev  ## only install, for work on HetSeq itself

clean:  ## remove caches and builds, not .venv and not runs/
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find hetseq tasks preprocessing tests bench -name __pycache__ -type d -prune -exec rm -rf {} +


# Installation. A stamp is newer than the files that say what to install, or the installation is repeated.

# torch goes first and pinned, in a call of its own: a wide range beside other packages makes pip look through, and
# fetch, gigabytes of CUDA packages. The build tools are those that torch has brought (setuptools), hence
# --no-build-isolation. TORCH_INDEX is for torch alone, but for ROCm: only its index has what that torch needs.
$(VENV)/.installed-core: requirements.txt | $(PY)
	@echo "installing torch and the core into $(VENV) (once; a few minutes on a slow line)"
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) $(if $(findstring rocm,$(TORCH_INDEX)),,--no-deps)) "$$(grep '^torch==' requirements.txt)"
	$(PIP) install -r requirements.txt
	@touch $@

$(VENV)/.installed-demo: $(VENV)/.installed-core requirements-dev.txt pyproject.toml
	$(PIP) install --no-build-isolation -c requirements-dev.txt -e '.[demo]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-core requirements-dev.txt pyproject.toml
	$(PIP) install "$$(grep '^setuptools-scm==' requirements-dev.txt)"  # first: seqeval is built with it
	DS_BUILD_OPS=0 $(PIP) install --no-build-isolation -r requirements-dev.txt  # deepspeed without compiled operators
	$(PIP) install --no-build-isolation -e '.[dev]'
	@touch $@

# Debian and Ubuntu ship Python without ensurepip; `python -m venv` would fail half-way and leave a broken folder.
$(PY):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: no $(PYTHON) here. Name one that is at least 3.10: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1), HetSeq needs Python 3.10 or newer." >&2; \
	  echo "      Name a newer one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: $(PYTHON) cannot make virtual environments: its venv or ensurepip module is missing. One of" >&2; \
	  echo "        sudo apt install python3-venv                                  (Debian, Ubuntu)" >&2; \
	  echo "        $(PYTHON) -m pip install --user virtualenv && $(PYTHON) -m virtualenv $(VENV)   (no root)" >&2; \
	  echo "        make $(MAKECMDGOALS) PYTHON=/path/to/another/python3              (conda, module load, uv)" >&2; \
	  echo "      and then make $(MAKECMDGOALS) again." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "make: $(PYTHON) -m venv $(VENV) failed, see above" >&2; exit 1; }
