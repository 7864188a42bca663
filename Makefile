# `make demo` runs the main job, `make test` passes the tests; both set everything up first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Test files run side by side, one worker a core; those that start federations run alone, after them.
JOBS ?= auto
COMPOSE ?= docker compose -f docker/compose.yaml
ROOMS := strategies client attacks audit report server deploy cli

.PHONY: demo docker-demo images pictures test check slow federations faults deployment containers docs release lint tree install clean

demo: install
	$(BIN)/bract demo

# The same federation in containers; the page ends up in runs/docker. Docker Compose 2.27 or newer.
docker-demo:
	trap '$(COMPOSE) down' EXIT; \
	$(COMPOSE) up --abort-on-container-failure federation audit && \
	mkdir -p runs && rm -rf runs/docker && $(COMPOSE) cp audit:/results/docker runs/docker && \
	echo "report: runs/docker/report.html"

# The images of demo and kits, tagged with the version in docker/.env.
images:
	$(COMPOSE) build
	docker compose -f docker/compose.gateway.yaml build

# The quick tests: no process of a federation, no fault, no slow reference.
test: install lint
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m "not (processes or faults or slow)"

# All that a change must pass.
check: test slow federations docs faults

# Slow, obviously correct references, and statistics that need many draws.
slow: install
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m "slow and not (processes or faults)"

# Real SuperLinks and SuperNodes, one federation after the other.
federations: install
	$(BIN)/pytest -m "processes and not (faults or containers or deployment)"

# Breaks running federations; minutes, so apart from the tests.
faults: install
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m "faults and not processes"
	$(BIN)/pytest -m "faults and processes"

# Writes the words of pages and verdicts in tests/report/golden anew; read the change before it is committed.
golden: install
	BRACT_GOLDEN=write $(BIN)/pytest -n 0 $$(grep -l "import check_words" tests/report/*.py)

# The site of documents, in build/site; every warning is an error. tests/test_site.py runs its snippets.
docs: install tree
	$(BIN)/mkdocs build --strict --quiet

# Passes the container tests, builds and checks distributions of the tag at HEAD, stops before publishing.
release: install
	.ci/release

# A wheel outside the checkout, the example app, the gateway, a restarted SuperLink, and where a Docker
# engine is, kits in containers with every fault in every phase (an hour); before a release.
deployment: install
	$(BIN)/pytest -m deployment

# On a real Docker engine, without every fault in every phase: builds the images first, the first time
# some minutes.
containers: install
	$(BIN)/pytest -m "containers and not deployment"

# The picture of the page in README and documents, of the page as the demo leaves it; needs Chromium.
pictures: demo
	chromium --headless --no-sandbox --disable-gpu --disable-background-networking --hide-scrollbars \
	--window-size=1280,900 --screenshot=docs/pictures/page.png "file://$(CURDIR)/runs/demo/report.html"

lint: install tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p bract
	$(BIN)/mypy tests experiments
	cd build/tree && PYTHONPATH=. ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-cache

# The rooms are sub-packages of `bract` that lie beside it; tools that read the file system see them as one tree here.
tree:
	rm -rf build/tree && mkdir -p build/tree/bract
	ln -s $(CURDIR)/bract/* build/tree/bract/
	for room in $(ROOMS); do ln -s $(CURDIR)/$$room build/tree/bract/$$room; done
	ln -s $(CURDIR)/experiments build/tree/experiments

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade -c constraints.txt pip
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs,release]"
	touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
