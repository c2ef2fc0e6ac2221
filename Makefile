# Everything runs in a virtual environment of its own, .venv unless VENV says otherwise.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The benchmarks need libraries that the project does not.
BENCH ?= .venv-bench
AUDIT ?= .venv-audit
# What decides the environment's contents, as a name: a checkout's new dates do not reinstall, changed contents do.
DEPENDENCIES := $(shell cat pyproject.toml constraints.txt | cksum | tr -d ' \t')
READY := $(VENV)/.ready-$(DEPENDENCIES)

.PHONY: demo test browser browser-test fuzz audit check format venv clean bench bench-venv bench-semi bench-baselines bench-suspects bench-ablations soak

demo: venv ## train on the embedded images, evaluate, and show what was learned (under 5 minutes)
	$(BIN)/cmsf train cmsf-self --out runs/demo
	@$(BIN)/cmsf evaluate runs/demo --references

# Many tests wait for processes that they started, so there are more workers than cores.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(1 + (os.cpu_count() or 1))")
test: venv ## all tests (about 10 minutes on two cores)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore tests/browser
	@echo "left out: the report in a real browser, which is make browser-test"

browser: ## Debian's Chromium and its driver, where they are missing
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
		if [ "$$(id -u)" = 0 ]; then as_root=; else as_root="sudo -n"; fi; \
		$$as_root apt-get update -qq; $$as_root apt-get install -y -qq chromium chromium-driver >/dev/null; } || { \
		echo "chromium and chromedriver are missing, and apt-get cannot install them here: install both, and put them on the PATH" >&2; \
		exit 1; }

browser-test: venv browser ## the report in a real Chromium: a minute
	$(BIN)/python -m pytest tests/browser

fuzz: venv ## hostile files of every kind, 2,000 of them (CASES=, SEED=), one thread in each process: two minutes
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m hostile --cases $(or $(CASES),2000) --seed $(or $(SEED),0) --out docs/results/fuzz.md

audit: ## known vulnerabilities of what is pinned, by PyPI's advisories; what cannot be looked up is a failure
	test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && \
		$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1; }
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off --requirement constraints.txt

check: venv ## format, lint, types, import contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

venv: $(READY) ## the environment alone: 6 GB, about two minutes
	@# A kept environment may come from another checkout: point it at this one.
	@test "$$(cat $(VENV)/.tree 2>/dev/null)" = "$(CURDIR)" || { \
		$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable . && \
		printf '%s' "$(CURDIR)" > $(VENV)/.tree; }

$(READY):
	$(PYTHON) -m venv --clear $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@printf '%s' "$(CURDIR)" > $(VENV)/.tree
	@touch $@

bench: bench-venv ## speed and memory beside others, an hour on an idle machine, resumable; writes docs/benchmarks.md (ROW=search, CIFAR=cifar10.npz)
	$(BENCH)/bin/python bench/run.py $(if $(ROW),--row $(ROW)) $(if $(CIFAR),--cifar $(CIFAR))

bench-semi: venv ## few labels on the embedded sample, and the ablations: three hours on two cores, resumable
	$(BIN)/python bench/semi.py --out docs/results/semi & $(BIN)/python bench/semi.py --out docs/results/semi; wait
	$(BIN)/python bench/semi_table.py docs/results/semi > docs/results/semi.md

bench-baselines: venv ## CMSF beside its baselines, with and without labels, and why coarse labels come out as they do: seven hours on two cores, resumable (DATA=folder of the data sets)
	$(BIN)/python bench/baselines.py --data $(DATA) --out docs/results/baselines & \
		$(BIN)/python bench/baselines.py --data $(DATA) --out docs/results/baselines; wait
	$(BIN)/python bench/coarse.py --data $(DATA) --out docs/results/coarse & \
		$(BIN)/python bench/coarse.py --data $(DATA) --out docs/results/coarse; wait
	$(BIN)/python bench/baselines_table.py docs/results/baselines > docs/results/baselines.md

bench-ablations: venv ## k, k' and the source of companions without labels: two hours on one core, resumable (DATA=folder of the data sets)
	$(BIN)/python bench/ablations.py --data $(DATA) --out docs/results/ablations

bench-suspects: venv ## wrong labels of CIFAR-10 that are found: 15 minutes on two cores (DATA=folder of the data sets)
	$(BIN)/python bench/suspects.py --data $(DATA) --out docs/results/suspects.json

MINUTES ?= 30
soak: venv ## runs that are killed, stopped and out of disk, compared bit for bit with one that is not: MINUTES=30
	PYTHONPATH=tests $(BIN)/python -m soak --minutes $(MINUTES) --out docs/results/soak.json

bench-venv:
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	PIP_CONSTRAINT=constraints.txt $(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable . --requirement bench/requirements.txt

clean:
	rm -rf $(VENV) $(BENCH) $(AUDIT) runs .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
