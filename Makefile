# Two commands for a user: `make demo` and `make test`. Each does its own set-up; a second run reuses the venv.
VENV ?= .venv
EXTRAS ?= dev,mooncake-cpu,nixl-cu12
PY = $(VENV)/bin/python
READY = $(VENV)/.kvarena-ready

.PHONY: demo test check kernels contract docs clean

demo: $(READY)
	$(VENV)/bin/kvarena demo $(ARGS)

test: $(READY)
	$(PY) -m pytest $(ARGS)

check: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# The real SGLang wheels, each release in a process of its own; what they need is kept in .cache/contract.
contract: $(READY)
	$(PY) tests/sglang/prepare.py $(ARGS)

# The CUDA kernels without a GPU: Triton interprets them on the CPU, and compiles them for three generations.
KERNELS = .cache/kernels
kernels: $(READY) $(KERNELS)/.ready
	KVARENA_KERNELS=1 PYTHONPATH=$(KERNELS) $(PY) -m pytest tests/kernels $(ARGS)

$(KERNELS)/.ready: constraints.txt
	$(PY) -m pip install -q --upgrade --no-deps --target $(KERNELS) -c constraints.txt triton
	@touch $@

docs: $(READY)
	$(PY) tools/hook_reference.py --check
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

$(READY): pyproject.toml constraints.txt tools/setup.sh
	sh tools/setup.sh $(VENV) $(EXTRAS)
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist site *.egg-info .cache
