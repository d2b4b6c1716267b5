# `make demo` trains and evaluates on generated data. `make test` runs the fast tests. Both first create .venv.
SUITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do $$p -c "$(SUITS)" 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)
RANKS ?= $(if $(filter-out 0,$(GPUS)),$(GPUS),2)
DEMO := runs/demo
export PATH := $(CURDIR)/$(BIN):$(PATH)
export TOKENIZERS_PARALLELISM := false
# Each of the tests' hundreds of processes would compile torch, transformers and DeepSpeed again, which takes 5 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-other lint bench clean
.DELETE_ON_ERROR:

# --use-pep517: seqeval has a setup.py alone, and pip before 23.1 would run it without what it needs.
# --no-compile: Python compiles the modules that a process imports; pip would compile all 23,000 files, which takes a minute.
$(VENV)/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 (with venv) is needed; set PYTHON=/path/to/python3.13"; exit 2; }
	@echo "installing xscale and its packages into $(VENV): 1 to 5 minutes, without further lines"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --use-pep517 -c constraints.txt --editable '.[dev,mpi,eval]'
	touch $@

data/demo: | $(VENV)/installed
	$(BIN)/python -m data_tools.demo_corpus --out $@

demo: $(VENV)/installed data/demo
	rm -rf $(DEMO)
	deepspeed --num_gpus $(RANKS) xscale/train.py --ds_config ds_configs/zero2_fp16.json --recipe mixed \
	    --data data/demo --out $(DEMO)/run --set checkpoint.keep=9
	@for step in before:checkpoints/step_00000000 after:; do \
	    name=$${step%%:*}; \
	    python -m xscale.export $(DEMO)/run/$${step#*:} $(DEMO)/$$name && \
	    python -m xscale.eval.run --model $(DEMO)/$$name --task heldout retrieval --data data/demo/heldout \
	        --out $(DEMO)/$$name.json > $(DEMO)/$$name.txt || exit 1; \
	done
	@for name in before after; do echo "$$name training:"; sed 's/^/  /' $(DEMO)/$$name.txt; done

test: $(VENV)/installed
	OMP_NUM_THREADS=1 python -m pytest -n auto --dist loadfile -m "not slow"

# Only the slow tests install the aligner, which must be compiled, Ray, and Debian's package of SLURM.
test-slow: $(VENV)/installed
	@for program in slurmctld slurmd munged; do command -v $$program > /dev/null || missing=yes; done; \
	test -z "$$missing" || { apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends slurm-wlm munge > /dev/null; } || \
	    { echo "tests/test_slurm.py needs SLURM, and root to install and run it: apt-get install slurm-wlm munge"; \
	    exit 2; }
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --use-pep517 -c constraints.txt --editable '.[align,ray]'
	OMP_NUM_THREADS=1 python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m slow

# `make test-other` installs the constraints in a second Python, if the machine has one that works (pyenv's commands answer
# for chosen versions only), and runs the tests of files and shards there. CI leaves it out, since it takes minutes.
OTHER ?= $(shell for v in 3.13 3.12 3.11; do $(PYTHON) --version | grep -q " $$v" && continue; \
    for p in python$$v $(HOME)/.pyenv/versions/$$v*/bin/python; do \
    $$p -c "import venv, ensurepip" 2>/dev/null && echo $$p && exit; done; done)
OTHER_TESTS := tests/test_pointers.py tests/test_security.py tests/test_shards.py
test-other:
	@test -n "$(OTHER)" || echo "no second Python: nothing to test"
	@test -z "$(OTHER)" || { set -ex; test -x .venv-other/bin/python || $(OTHER) -m venv .venv-other; \
	    .venv-other/bin/pip install --quiet --disable-pip-version-check --use-pep517 -c constraints.txt --editable '.[dev]'; \
	    OMP_NUM_THREADS=1 .venv-other/bin/python -m pytest -m "not slow" $(OTHER_TESTS); }

lint: $(VENV)/installed
	ruff format --check .
	ruff check .
	mypy

bench: $(VENV)/installed
	python benchmarks/gather.py
	python benchmarks/head.py
	python benchmarks/loader.py
	python benchmarks/step.py

clean:
	rm -rf $(VENV) .venv-other data/demo runs/demo
