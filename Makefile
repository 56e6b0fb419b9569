# Every target sets itself up: Python >= 3.10 and make are all that is needed.
#
#   make demo          train a small GPT on two ranks, compare with one process, and write
#                      build/demo/report.html; ARGS="--zero-stage 2 --steps 50"
#   make test          lint and run the tests that are not slow, two at a time;
#                      ARGS="-k gather -x", ARGS="-n 0 --pdb"
#   make test-all      lint and run all tests
#   make lint          ruff, ruff format, mypy
#   make docs          the documentation as a site, in build/site
#   make bench         step time, memory and communication against other systems;   ARGS="--help"
#   make clean         remove what was built; `make distclean` removes .venv too
#
# Paths are relative throughout, so that the checkout may lie in a folder whose name has spaces.

PYTHON ?= python3
ARGS ?=
PY := .venv/bin/python
INSTALLED := .venv/.installed
TYPED := build/typed/zpasses

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint ruff docs bench clean distclean FORCE

help:
	@sed -n 's/^#   //p' Makefile

setup: $(INSTALLED)

demo: $(INSTALLED)
	@rm -rf build/demo
	$(PY) examples/train_gpt.py --ranks 2 --dump build/demo $(ARGS)

# Two keep two cores busy, because most tests run two ranks. They start some hundred processes, which
# share compiled bytecode whatever the environment says.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n 2 --dist worksteal

# Property tests draw a fifth of their examples. pyproject.toml tells which tests are slow.
test: QUICK := -m "not slow" --hypothesis-profile quick

# mypy runs beside the tests, and prints its errors when it has them.
test test-all: ruff $(TYPED)
	@mkdir -p build; \
	  { $(PY) -m mypy || { echo "mypy failed, see above; the tests go on"; false; }; } & mypy=$$!; \
	  trap 'kill $$mypy 2>/dev/null' INT TERM; \
	  $(PYTEST) $(QUICK) $(ARGS); tests=$$?; \
	  wait $$mypy || { echo "make: mypy failed; its errors are above, or: make lint" >&2; exit 1; }; \
	  exit $$tests

lint: ruff $(TYPED)
	$(PY) -m mypy

ruff: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# mypy sees the package as it is imported: zpasses/ with passes/ and tools/ in it, as links, because
# it cannot follow the mapping of the editable install.
$(TYPED): FORCE
	@rm -rf build/typed && mkdir -p $(TYPED)
	@for item in zpasses/* passes tools; do ln -s "../../../$$item" "$(TYPED)/$${item##*/}"; done

FORCE:

# NO_MKDOCS_2_WARNING silences a notice of the theme about its successor.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS)
	@echo "The documentation is in build/site/index.html."

bench: $(INSTALLED)
	$(PY) -m zpasses.tools.bench $(ARGS)

clean:
	rm -rf build dist zpasses.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv

# Runs again only when what to install has changed.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "make: no $(PYTHON) found; install Python >= 3.10 or run:" \
	    "make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: $$("$(PYTHON)" --version) is too old; zpasses needs Python >= 3.10. Run:" \
	    "make PYTHON=/path/to/python3.10" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $(PYTHON) lacks the venv module; install it" \
	    "(Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear .venv
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
