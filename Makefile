# `make demo` runs the main job, `make test` passes the tests; both set everything up first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Test files run side by side, one worker a core; those that start federations run alone, after them.
JOBS ?= auto
# Compiled modules are kept: without them every process compiles PyTorch, Flower and bract anew.
export PYTHONDONTWRITEBYTECODE :=
# Packages of their own, and their import names: bract-harden is bract_harden.
PLUGINS := $(patsubst %/pyproject.toml,%,$(sort $(wildcard plugins/*/pyproject.toml)))
PLUGIN_NAMES := $(subst -,_,$(notdir $(PLUGINS)))
SPACE := $(subst ,, )
COMPOSE ?= docker compose -f docker/compose.yaml

.PHONY: demo docker-demo images pictures test quick durations check thorough slow captures federations flower faults deployment containers golden docs stranger release lint install clean

demo: $(VENV)/.installed-demo
	$(BIN)/bract demo

# The same federation in containers; the page ends up in runs/docker. Docker Compose 2.27 or newer.
docker-demo:
	docker/demo.sh $(COMPOSE)

# The images of demo and kits, tagged with the version in docker/.env.
images:
	$(COMPOSE) build
	docker compose -f docker/compose.gateway.yaml build

# Style, types and arrows side by side with the quick tests, of the plug-ins too.
test: $(VENV)/.installed-test
	.ci/side-by-side "$(MAKE) lint" "$(MAKE) quick"

# The quick tests: no process of a federation, no fault, none that takes seconds.
quick: $(VENV)/.installed-test
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m "not (processes or faults or slow or thorough)"

# The quick tests, with where their time goes in tests/durations.json; on a quiet machine.
durations: $(VENV)/.installed-test
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m "not (processes or faults or slow or thorough)" \
	-o junit_duration_report=total --junitxml=build/durations.xml
	$(BIN)/python tests/durations.py build/durations.xml

# All that continuous integration runs but the containers.
check: test thorough docs federations flower faults

# Tests that take seconds each: attacks over all uploads of the pack, audits to the page, a browser.
thorough: $(VENV)/.installed-test
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m "thorough and not (processes or faults or slow)" $(call marked,thorough)

# Slow, obviously correct references, and statistics that need many draws; `make release` requires them.
slow: $(VENV)/.installed-test $(VENV)/.installed-docs $(VENV)/.installed-release
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m "slow and not (processes or faults)"

# Files with a test of a mark: collecting the others would import everything once more.
marked = $$(grep -rlE "mark\.($(1))\b" tests --include="test_*.py")

# Real SuperLinks and SuperNodes.
federations: $(VENV)/.installed-test
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m "processes and not (faults or containers or deployment)" $(call marked,processes)

# The public layer on every Flower from 1.21 on; FLOWERS=few, or releases such as FLOWERS="1.30 newest".
FLOWERS ?= all
flower: $(VENV)/.installed-test
	mkdir -p build
	$(BIN)/python tests/flower/flowers.py build/flower $(FLOWERS) > build/flowers
	set -e; while read python; do \
	  echo "$$python"; "$$python" -m pytest -n 0 -q -p no:cacheprovider tests/flower; \
	done < build/flowers

# Breaks running federations; minutes, so apart from the tests. A process that may write no more would
# leave compiled modules that are cut off, so these compile anew.
faults: export PYTHONDONTWRITEBYTECODE := 1
faults: $(VENV)/.installed-test
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m faults $(call marked,faults)

# Writes the words of pages, verdicts and gates in tests/*/golden anew; read the change before it is committed.
golden: $(VENV)/.installed-test
	BRACT_GOLDEN=write $(BIN)/pytest -n 0 $$(grep -rl --include="test_*.py" "import check_words" tests)

# Computes tests/captures anew: uploads and what attacks reach on them; read the change of expected.json.
captures: $(VENV)/.installed-test
	PYTHONPATH=tests:. $(BIN)/python tests/captures/make.py $(RESULTS)

# The site of documents, in build/site; every warning is an error. tests/test_site.py runs its snippets.
docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict --quiet

# The wheels as a stranger installs them: the demo, then the quick tests, on other Pythons (a version or
# a path) beside the newest of everything, and beside the lowest releases that pyproject.toml declares.
STRANGERS ?= 3.12 3.13 lowest lowest-runtime
export STRANGERS
stranger: $(VENV)/.installed-release
	.ci/stranger $(STRANGERS)

# Passes all tests that continuous integration leaves out, builds and checks distributions of the tag at HEAD, stops before publishing.
release: $(VENV)/.installed-test $(VENV)/.installed-docs $(VENV)/.installed-release
	.ci/release

# A wheel outside the checkout, the example app, the gateway, a restarted SuperLink, and where a Docker
# engine is, kits in containers with every fault in every phase (an hour); before a release.
deployment: $(VENV)/.installed-test
	$(BIN)/pytest -m deployment

# On a real Docker engine, without every fault in every phase: builds the images first, the first time
# some minutes.
containers: $(VENV)/.installed-test
	$(BIN)/pytest -m "containers and not deployment"

# The picture of the page in README and documents, of the page as the demo leaves it; needs Chromium.
pictures: demo
	chromium --headless --no-sandbox --disable-gpu --disable-background-networking --hide-scrollbars \
	--window-size=1280,900 --screenshot=docs/pictures/page.png "file://$(CURDIR)/runs/demo/report.html"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p bract $(addprefix -p ,$(PLUGIN_NAMES))
	$(BIN)/mypy tests experiments
	PYTHONPATH=$(CURDIR)$(subst $(SPACE),,$(addprefix :,$(abspath $(PLUGINS)))) $(BIN)/lint-imports --no-cache

# All of them, to change the project.
install: $(VENV)/.installed-test $(VENV)/.installed-docs $(VENV)/.installed-release

# What each target needs and no more; one environment, a stamp a part. All but the demo have the
# packages of plugins/, too.
EXTRAS_demo := audit
EXTRAS_test := dev
EXTRAS_docs := audit,docs
EXTRAS_release := release
PLUGINS_test := $(PLUGINS)
PLUGINS_docs := $(PLUGINS)

$(VENV)/.installed-%: pyproject.toml constraints.txt .ci/install $(PLUGINS:%=%/pyproject.toml)
	@VENV=$(VENV) PYTHON=$(PYTHON) .ci/install $* $(EXTRAS_$*) $(PLUGINS_$*)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
