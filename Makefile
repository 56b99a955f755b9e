# Everything lives in .venv and, for the demo model, in the user's cache folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NPU_VENV := .venv-npu
NPU_WHEELS := torch==2.13.0 torch_npu==2.13.0
CODE := pd_service kv_cache transfer tests benchmarks

.PHONY: setup mooncake serve test soak lint types proto bench clean

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	@echo "setting up $(VENV): about a minute the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --editable ".[dev]"
	@touch $@

mooncake: setup  # the optional data plane; without it its tests are skipped
	$(BIN)/python -m pip install --quiet --retries 1 --timeout 20 --editable ".[mooncake]"

serve: setup
	@exec $(BIN)/pd-service serve

test: setup
	$(BIN)/python -m pytest

# Ascend NPUs, emulated: needs gcc, and an environment of its own, because torch does not start beside torch_npu without
# CANN. Left out, and said so, only where the library's wheel cannot be had.
test-npu:
	@$(PYTHON) -m venv $(NPU_VENV)
	@if [ -e $(NPU_VENV)/installed ] || $(NPU_VENV)/bin/python -m pip install --quiet $(NPU_WHEELS); \
	then $(MAKE) --no-print-directory $(NPU_VENV)/installed && $(NPU_VENV)/bin/python -m pytest -p tests.npu.load_emulation tests/npu; \
	else echo "NPU tests are skipped: pip cannot get $(NPU_WHEELS) here (see above)"; fi

$(NPU_VENV)/installed: pyproject.toml
	$(NPU_VENV)/bin/python -m pip install --quiet --editable ".[npu,dev]"
	@touch $@

soak: setup  # minutes of random lives: block bookkeeping, one engine, whole requests under crashes; then planted faults
	PD_SOAK=10 $(BIN)/python -m pytest tests/test_kv_laws.py
	PD_SOAK=20 $(BIN)/python -m pytest --timeout 1800 tests/test_split_lives.py
	$(BIN)/python -m tests.engine_lives 1000 4000
	$(BIN)/python -m tests.sim_chaos 1000 4000
	$(BIN)/python -m tests.kv_mutants
	$(BIN)/python -m tests.engine_mutants

lint: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: setup
	$(BIN)/mypy

proto: setup
	$(BIN)/python -m grpc_tools.protoc --proto_path=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/pd_service/rpc/*.proto

bench: setup
	$(BIN)/python -m benchmarks.kv_cache
	$(BIN)/python -m benchmarks.transfer
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.failures
	$(BIN)/python -m benchmarks.serve
	$(BIN)/python -m benchmarks.engine

clean:
	rm -rf $(VENV) $(NPU_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
