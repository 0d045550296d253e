# The front door. Each target is one line that calls `carry`; `make` alone prints them.
UPSTREAM ?=
VERSION ?=
FAULT ?=
PORT ?= 8080
PYTHON ?= python3

CARRY := .venv/bin/carry
READY := .venv/.ready
PIN := --upstream '$(UPSTREAM)' --version '$(VERSION)'

.DEFAULT_GOAL := help
.PHONY: help build-wheels test test-tool test-resume test-client prove index serve apply refresh lint bench record doctor clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1 | \2/p' Makefile | awk -F ' [|] ' '{ printf "%-18s %s\n", $$1, $$2 }'

build-wheels: $(READY) ## build the patched and pristine wheels of every pin, or of UPSTREAM= VERSION=
	@$(CARRY) build-wheels $(PIN)

test: $(READY) ## lint, the tool, every pin red and green, the index, a real pip and uv
	@$(CARRY) test

test-tool: $(READY) ## test the tool: offline, seconds
	@$(CARRY) test-tool

test-resume: $(READY) ## regression tests; UPSTREAM= VERSION= FAULT= narrow them
	@$(CARRY) test-resume $(PIN) --fault '$(FAULT)'

test-client: $(READY) ## install from dist/simple/ with pip and uv, as a user would
	@$(CARRY) test-client

prove: $(READY) ## run the regression tests on both flavours and write dist/proofs/
	@$(CARRY) prove $(PIN)

index: $(READY) ## publish proven wheels to dist/simple/
	@$(CARRY) index $(PIN)

serve: $(READY) ## serve dist/simple/ on loopback at PORT=
	@$(CARRY) serve --port '$(PORT)'

apply: $(READY) ## lay the work tree of UPSTREAM= VERSION= below build/trees/, one commit per patch
	@$(CARRY) apply '$(UPSTREAM)' '$(VERSION)'

refresh: $(READY) ## export the work tree of UPSTREAM= VERSION= back to its patch files
	@$(CARRY) refresh '$(UPSTREAM)' '$(VERSION)'

lint: $(READY) ## check every series against the rules
	@$(CARRY) lint $(PIN)

bench: $(READY) ## measure what the tool costs, as ratios
	@$(CARRY) bench

record: $(READY) ## keep the proofs of this machine in patches/, and the README's table
	@$(CARRY) record $(PIN)

doctor: $(READY) ## look at what this machine has and lacks
	@$(CARRY) doctor

clean: $(READY) ## remove build/ and dist/, unless a work tree holds unexported work
	@$(CARRY) clean

$(READY): pyproject.toml scripts/bootstrap.py
	@$(PYTHON) scripts/bootstrap.py
