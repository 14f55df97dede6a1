# make pretrain   a GPT mixture-of-experts on real text; more flags: make pretrain ARGS="--train-iters 500"
# make test       lint, types and every test that this machine can run, 3 workers for 2 cores (in one process where there are GPUs)
# make test-fast  lint, types and the tests that start no rank and no program, compile nothing, interpret no kernel
# make test-versions  every supported minor version of Megatron-Core, from the package index
# make bench      every benchmark on all GPUs of this host, then the tables: make bench ARGS="--only moe_layer attention"
# make release-check  before a tag: versions and changelog, sdist and wheel in clean environments, docs, and every figure: fails on one
#                 whose results file is of older code or of a changed tree
# make bench-hosts  overlap between hosts that this machine plays: root, iproute2, no GPU; about an hour on 2 quiet cores
#
# All make .venv first, if it is not there or its requirements changed. To use an environment of your own instead, in which
# this package is installed with its extras "megatron" and "dev": make test PYTHON=python3
# A GPU each by default, else 2 processes: make pretrain RANKS=4

VENV := .venv
PYTHON := $(VENV)/bin/python
ifneq ($(origin PYTHON),command line)
READY := $(VENV)/.ready
endif
RANKS = $$($(PYTHON) -c 'import torch; print(torch.cuda.device_count() or 2)')
ARGS :=
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PYTHON) -m pytest -n auto --dist loadgroup --no-loadscope-reorder

.PHONY: pretrain test test-versions test-fast lint style bench bench-hosts environment readme release-check clean

pretrain: $(READY)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PYTHON) -m megatron_fluid.cli run --nproc-per-node $(RANKS) \
		examples/pretrain_gpt_moe.py $(ARGS)

# Types are checked beside the tests: alone they leave a core idle for a minute.
test: style
	$(PYTHON) tools/typecheck.py & types=$$!; $(PYTEST) $(TIER) $(ARGS); tests=$$?; \
		wait $$types || { echo "the type check failed: make lint shows its errors" >&2; exit 1; }; exit $$tests

test-fast: TIER = --ignore=tests/gpu -m "not (world or compile or process or interpreter or slow or gpu)"
test-fast: test

test-versions: $(READY)
	$(PYTHON) -m tools.versions $(ARGS)

lint: style
	$(PYTHON) tools/typecheck.py

style: $(READY)
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -c 'import clang_format; clang_format.clang_format()' --dry-run --Werror $(wildcard megatron_fluid/kernels/*/*.cu*)

bench: $(READY)
	PYTHON=$$(command -v $(PYTHON)) $(PYTHON) -m benchmarks.harness.run_all $(ARGS)
	$(PYTHON) -m tools.readme
	$(PYTHON) -m benchmarks.report.pictures

bench-hosts: $(READY)
	$(PYTHON) -m benchmarks.suites.slow_wire $(ARGS)

environment: $(READY)

readme: $(READY)
	$(PYTHON) -m tools.readme

release-check: $(READY)
	$(PYTHON) -m pytest -q tests/unit/house/test_packaging.py tests/distributed/test_readme.py -k "not make_ and not snippet"
	$(PYTHON) -m tools.release_check

$(VENV)/.ready: .ci/environment.sh .ci/constraints.txt setup.py pyproject.toml
	.ci/environment.sh $(VENV)
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
