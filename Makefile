# One word per chore. Each makes .venv when it is missing and installs from pyproject.toml and constraints.txt.
#   make demo      train a small DeepSeek over three emulated continents
#   make test      lint, build the documentation, run every test
#   make lint | format | docs | bench | soak | install | clean

PYTHON ?= python3
WORKERS ?= 3
SOAK_RUNS ?= 20
SOAK_DURATION ?= 2h
SOAK_SEED ?= 1
SOAK_PARTS ?= tests,long,fuzz,soak

BIN := .venv/bin
STAMP := .venv/.installed
SOURCES := src tests $(wildcard examples)

.PHONY: install demo test lint format docs bench soak clean browser

install: $(STAMP)

# pip knows dependency groups since 25.1, which is newer than the pip of many Pythons: so it is upgraded first.
$(STAMP): pyproject.toml constraints.txt hatch_build.py src/ciuic/codec/kernel.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ciuic needs Python 3.11 or newer; try: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable . --group dev --constraint constraints.txt
	@touch $@

demo: $(STAMP)
	$(BIN)/ciuic demo

# Tests marked `alone` measure time or use every core, so nothing runs beside them. Many tests start a dozen processes, and
# many wait: three at a time keep two cores busy, and who has nothing left takes from who has (worksteal). One that fails
# is run again, twice at most, and the summary names it (R).
RERUN := --reruns 2 --reruns-delay 1 -rR
test: lint docs browser
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(RERUN) -m "not alone"
	$(BIN)/python -m pytest $(RERUN) -m alone

browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
		echo "NOTE: chromium or chromedriver is missing: the live page's browser test will be skipped."; \
		echo "      Debian and Ubuntu: apt-get install chromium chromium-driver"; }

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ty check --python .venv
	$(BIN)/lint-imports
	$(BIN)/deptry src

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet

bench: $(STAMP)
	for name in codec hub ddp sync learning; do $(BIN)/ciuic bench $$name || exit 1; done

# The tests of failures again and again, every test once at full length (--hypothesis-profile=soak), a million fuzzed
# messages, and hours in which something fails all the time.
soak: $(STAMP)
	$(BIN)/python tests/soak.py --repeat $(SOAK_RUNS) --duration $(SOAK_DURATION) --seed $(SOAK_SEED) \
		--workers $(WORKERS) --only $(SOAK_PARTS)

clean:
	rm -rf .venv site demo bench lab soak dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
