# What one does with this checkout. `make` lists it.

CARGO ?= cargo

.PHONY: help setup build demo test check programs escalations gpu

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s  %s\n", $$1, $$2 }' Makefile

setup: ## a compiler and a CRIU that works; quick when they are there (root)
	@scripts/setup

build: setup ## the program: target/release/ckpt-run
	$(CARGO) build --release --bin ckpt-run

demo: setup ## snapshot a job, kill it, watch it come back (root)
	$(CARGO) build --release --bin ckpt-run --example count
	@scripts/demo

test: setup ## all tests (root; those that need a GPU are skipped without one)
	@scripts/setup-tests
	@scripts/test

check: setup ## format, lints, documentation; all workspace members
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

programs: build ## real programs that work on files: each is killed and restored; installs them (root)
	tests/programs/run --watch both

escalations: build ## jobs of user nobody that try to gain root's files: 100 rounds of each case (root)
	tests/escalations/run --rounds 100

gpu: ## what to run on a machine with a GPU, and where
	@scripts/gpu-help
