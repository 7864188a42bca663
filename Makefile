# `make demo` runs the main job, `make test` passes the tests; both set everything up first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
COMPOSE ?= docker compose -f docker/compose.yaml
ROOMS := strategies client attacks server cli

.PHONY: demo docker-demo test lint tree install clean

demo: install
	$(BIN)/bract demo

# The same federation in containers; the page ends up in runs/docker. Docker Compose 2.27 or newer.
docker-demo:
	trap '$(COMPOSE) down' EXIT; \
	$(COMPOSE) up --abort-on-container-failure federation audit && \
	mkdir -p runs && rm -rf runs/docker && $(COMPOSE) cp audit:/results/docker runs/docker && \
	echo "report: runs/docker/report.html"

test: install lint
	$(BIN)/pytest

lint: install tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/tree $(BIN)/mypy -p bract
	cd build/tree && PYTHONPATH=. ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-cache

# The rooms are sub-packages of `bract` that lie beside it; tools that read the file system see them as one tree here.
tree:
	rm -rf build/tree && mkdir -p build/tree/bract
	ln -s $(CURDIR)/bract/* build/tree/bract/
	for room in $(ROOMS); do ln -s $(CURDIR)/$$room build/tree/bract/$$room; done

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade -c constraints.txt pip
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
