# `make demo` and `make test` set everything up by themselves; `make setup` alone makes the environment (.venv).
PYTHON ?=
# uv or pip; empty: uv if it is installed.
INSTALLER ?=
BIN := .venv/bin
# Test processes, each with one thread: one more than cores, since tests of several processes wait for one another. Tests
# that share an expensive set-up stay together.
JOBS ?= $(shell expr $$(nproc) + 1)
# What SGLang servers run on: cpu, or cuda if there are GPUs.
SGLANG_DEVICE ?= cpu
# Their release (empty: the default one), and the folder of their environment, which holds one release.
SGLANG_VERSION ?=
SGLANG_ENV ?= .venv-sglang
export MOERL_SGLANG_ENV ?= $(abspath $(SGLANG_ENV))
# Compilers side by side in `make gpu`; each takes a few GiB.
MAX_JOBS ?= 4

.PHONY: setup lock gpu sglang environments demo demo-sglang lint lint-types lint-rules test test-slow test-distributed test-sglang test-slurm test-ray test-environments test-chaos test-transformer-engine bench bench-sglang golden clean

setup: .venv/.ready

.venv/.ready: pyproject.toml scripts/setup.sh requirements/build.lock requirements/run.lock
	@exec env PYTHON="$(PYTHON)" INSTALLER="$(INSTALLER)" bash scripts/setup.sh

# Newer versions: resolves pyproject.toml and requirements/*.in again. Needs uv.
lock:
	@bash scripts/lock.sh

# On a GPU if torch can use one (scripts/demo.sh).
demo: setup
	@bash scripts/demo.sh

# The demo with rollouts from an SGLang server on CPU; fewer steps.
demo-sglang: setup sglang
	$(BIN)/moerl train recipe=laptop rollout=sglang "rollout.environment='$(MOERL_SGLANG_ENV)'" rl.steps=24

# Types take longest, and one core.
lint: setup
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint-types lint-rules

# Its collector of garbage takes a fifth of the time if it has little room.
lint-types:
	NODE_OPTIONS="--max-semi-space-size=128 --max-old-space-size=6144" $(BIN)/pyright

lint-rules:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_sizes.py
	$(BIN)/python scripts/check_http.py
	$(BIN)/python scripts/check_words.py

test: setup sglang
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow and not distributed and not sglang and not slurm and not ray and not environments" tests

test-slow: setup sglang
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "slow and not sglang and not slurm and not ray and not environments" tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and sglang" tests

# Every layout; up to eight processes in one test, so one test at a time.
test-distributed: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "distributed and not slurm" tests

# Ray clusters on this machine; `pip install "moerl[ray]"` first.
test-ray: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray tests

# Libraries of the extra `environments`; `make environments` first.
test-environments: setup sglang
	$(BIN)/python -m pytest -m environments tests

# Live SGLang servers on CPU, in an environment of their own (2.2 GB). The test of parity is part of `make test`; those of
# whole runs and of servers that die or hang, which take minutes of real time, of `make test-slow`.
test-sglang: setup sglang
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "sglang and not slow" tests

# Jobs of a SLURM that the tests start on loopback; if its packages are missing, root on Debian or Ubuntu
# installs them, and otherwise the tests are skipped with the reason. Minutes.
test-slurm: setup
	@command -v sbatch >/dev/null && command -v shellcheck >/dev/null || [ "$$(id -u)" != 0 ] || \
	  apt-get install -y --no-install-recommends slurm-wlm munge shellcheck || true
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -m slurm tests

# A hundred kills, stops and full disks in a quarter of an hour, at random moments of runs that are resumed until they end.
test-chaos: setup sglang
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos_campaign.py --disturbances 100 --minutes 15

# The layers of a GPU, built on a CPU: installs the Python code of Transformer Engine (54 MB, without its kernels).
test-transformer-engine: setup
	@bash scripts/transformer_engine.sh
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/distributed/test_transformer_engine.py

# The environment of SGLang servers, apart from our own; one of another device or version of the patches is renewed.
sglang: setup
	$(BIN)/moerl sglang install --device $(SGLANG_DEVICE) --env "$(MOERL_SGLANG_ENV)" $(SGLANG_VERSION:%=--version %)

# The extra `gpu`: Transformer Engine and flash attention, which are built against the torch that is installed. Needs CUDA's
# compiler and headers, and takes up to an hour if there is no built wheel (docs/gpu_nodes.md).
gpu: setup
	$(BIN)/python -m pip install ninja psutil
	MAX_JOBS=$(MAX_JOBS) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --no-build-isolation --editable ".[gpu]"

# Libraries of environments. OpenEnv and verifiers need releases of mcp that do not go together: each has an interpreter
# of its own, which the tests start.
environments: setup
	$(BIN)/python -m pip install --editable ".[environments]"
	$(BIN)/python -m venv .venv-openenv && .venv-openenv/bin/python -m pip install openenv==0.10.0
	$(BIN)/python -m venv .venv-verifiers && .venv-verifiers/bin/python -m pip install verifiers==0.4.0

# What other implementations compute (tests/golden), made again and compared; each package in a folder of its own.
golden: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.golden

bench: setup
	for file in $$(ls bench/[a-z]*.py | grep -v -e _gpu -e gpu_ -e rollout_wire -e episodes_learning); do $(BIN)/python $$file || exit 1; done

# The one benchmark that needs a live server.
bench-sglang: setup sglang
	$(BIN)/python bench/rollout_wire.py --env "$(MOERL_SGLANG_ENV)"

clean:
	rm -rf .venv .venv-sglang* .venv-openenv .venv-verifiers dist build
