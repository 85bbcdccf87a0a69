# Commands for this checkout. `make` lists them.

CARGO ?= cargo

.PHONY: help setup build demo test check programs escalations cuts power wheel deb gpu

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s  %s\n", $$1, $$2 }' Makefile

setup: ## provide a compiler and a working CRIU; quick if they exist (root only to install a compiler)
	@scripts/setup

build: setup ## build target/release/ckpt-run
	$(CARGO) build --release --bin ckpt-run

# The build of the tests: it takes half as long as that of target/release.
demo: setup ## snapshot, kill and restore a job, and compare its result
	$(CARGO) build --bin ckpt-run
	@scripts/demo

test: setup ## run all tests; those that need root or a GPU are skipped without
	@scripts/setup-tests
	@scripts/test

check: setup ## check format, lints and documentation of all workspace members
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

programs: build ## install, kill and restore real programs: databases, tools, MPI, a notebook (root)
	tests/programs/run --watch both

escalations: build ## run jobs of user nobody that try to access root's files (root)
	tests/escalations/run --rounds 100

cuts: build ## cut a node off the network and continue its run on another one (root)
	@scripts/setup-tests
	tests/cuts/run

power: build ## let a machine's power fail at random moments and continue its run (root)
	tests/power/run

wheel: ## build the wheels for pip in target/wheels: the program with its Python module, and CRIU (root)
	@scripts/wheel

deb: build ## build the Debian packages in target/debs: the program with its manual pages and service, and CRIU (root)
	@scripts/deb

gpu: ## print the tests for a machine with a GPU
	@scripts/gpu-help
