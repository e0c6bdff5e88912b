# Two commands for a newcomer: `make demo` runs the main job, `make test` passes the tests.
# `make notebooks` executes the notebooks again, with their outputs to be committed.
# `make exhaustive` runs every case of the tests: every model under every strategy and schedule, a
# rank killed at every kind of action, many more drawn cases. Hours.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: demo test docs notebooks exhaustive faults gpu clean

$(VENV)/.installed: setup.cfg setup.py pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m autopar.demo

test: $(VENV)/.installed
	PYTHON=$(CURDIR)/$(BIN)/python sh tests/run.sh

docs: $(VENV)/.installed
	$(BIN)/python -m mkdocs build --strict

notebooks: $(VENV)/.installed
	$(BIN)/python -m pytest -q --nbmake --nbmake-timeout=600 --overwrite notebooks
	$(BIN)/python tests/tidy_notebooks.py notebooks/*.ipynb

exhaustive: $(VENV)/.installed
	AUTOPAR_EXHAUSTIVE=1 PYTEST_ADDOPTS=--timeout=7200 PYTHON=$(CURDIR)/$(BIN)/python sh tests/run.sh

# A thousand drawn faults in running jobs; one alone: python -m tests.faults.run --numbers 17
NUMBERS ?= 0-999
PARALLEL ?= 6
faults: $(VENV)/.installed
	$(BIN)/python -m tests.faults.run --numbers $(NUMBERS) --parallel $(PARALLEL)

# On a machine with CUDA: tests (NCCL where there are several GPUs), then benchmarks beside peers,
# whose results go to benchmarks/results/*_gpu.json. Each step ends within ten minutes.
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | wc -l)
WITHIN := timeout 600
ON_ONE := $(WITHIN) $(BIN)/python benchmarks/runtime.py --device cuda --world-sizes 1 \
	--precision bf16 --kernels eager compiled
gpu: $(VENV)/.installed
	@test $(GPUS) -gt 0 || { echo "make gpu: nvidia-smi lists no GPU on this machine" >&2; exit 1; }
	OMP_NUM_THREADS=1 $(WITHIN) $(BIN)/python -m pytest -q -m gpu -rs --numprocesses=8 \
		tests/runtime/test_gpu.py tests/runtime/test_workers.py
	$(ON_ONE) --cases densenet121 gpt2_small
	$(ON_ONE) --cases bert_base resnet50_224
	$(ON_ONE) --cases roberta_base convnext_tiny
	$(ON_ONE) --cases llama_300m
	test $(GPUS) -lt 2 || $(WITHIN) $(BIN)/python benchmarks/runtime.py --device cuda \
		--world-sizes $(GPUS) --cases gpt2 roberta --kernels eager
	$(WITHIN) $(BIN)/python benchmarks/fusion.py --skip-sweeps --sizes 1 4 16 \
		--out benchmarks/results/fusion_gpu.json

clean:
	rm -rf $(VENV) build *.egg-info
