PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
# Of pytest-xdist's schedulers, this one goes on when a test kills its process; tests beside each other stay together.
PARALLEL := -n 2 --dist worksteal --max-worker-restart 4

.PHONY: install demo test test-fast check docs fuzz bench dist clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/fedstill demo

# The many processes that tests start do not each compile the sources anew, also where Python is told to keep nothing.
test test-fast: export PYTHONDONTWRITEBYTECODE =
# Most of what the system does for tests is to copy pages for their forks: larger pages are fewer (glibc's setting).
test test-fast: export GLIBC_TUNABLES = glibc.malloc.hugetlb=1

test: install  # four processes, as many tests wait for servers and sites
	$(BIN)/python -m pytest $(PARALLEL) -n 4 --doctest-modules --durations 10 src tests docs

test-fast: install
	$(BIN)/python -m pytest $(PARALLEL) --doctest-modules -m "not slow" src tests docs

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/docs  # into site/; warnings are errors, nothing is fetched
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

.venv/docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

fuzz: install
	$(BIN)/python tools/fuzz.py --seconds 600

bench: .venv/bench
	$(BIN)/python -m benchmarks

.venv/bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	touch $@

dist: .venv/dist  # what could be uploaded; the wheel is tried in an environment of its own, away from the sources
	rm -rf dist build .venv/wheel
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv .venv/wheel
	.venv/wheel/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	cd .venv/wheel && bin/fedstill demo --rounds 2 --out demo

.venv/dist: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dist]'
	touch $@

clean:
	rm -rf .venv .bench build dist site *.egg-info src/*.egg-info
