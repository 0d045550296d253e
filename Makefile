# The front door. Each target is one line that calls `carry`; `make` alone prints them.
# `make NAME=value` sets these; plain `=`, because a VERSION or PORT in the caller's environment means something else.
UPSTREAM =
VERSION =
FAULT =
FLAVOUR =
CELLS =
PORT = 8080
PYTHON =
PIN =
FROM =
TO =
BEHAVIOUR =
TESTS =
WRITE =
TEXT =
WHOLE =
# The shell takes the values from its environment, so that it reads no quote of theirs as its own.
export UPSTREAM VERSION FAULT FLAVOUR CELLS PORT PIN FROM TO BEHAVIOUR TESTS

CARRY := .venv/bin/python -m carry.cli
WHICH := --upstream "$$UPSTREAM" --version "$$VERSION"

.DEFAULT_GOAL := help
.PHONY: help ready build-wheels test test-tool test-resume test-client prove matrix matrix-full matrix-all matrix-slice leave-one-out \
	index serve apply refresh lint bench bench-load record bump replay plan doctor clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1 | \2/p' Makefile | awk -F ' [|] ' '{ printf "%-18s %s\n", $$1, $$2 }'

build-wheels: ready ## build the patched and pristine wheels of every pin, or of UPSTREAM= VERSION=
	@$(CARRY) build-wheels $(WHICH)

test: ready ## lint, the tool, every pin red and green, a slice of the matrix, the index, a real pip and uv
	@$(CARRY) test

test-tool: ready ## test the tool: offline, seconds
	@$(CARRY) test-tool

test-resume: ready ## regression tests; UPSTREAM= VERSION= FAULT= narrow them
	@$(CARRY) test-resume $(WHICH) --fault "$$FAULT"

test-client: ready ## install from dist/simple/ with pip and uv, as a user would
	@$(CARRY) test-client

prove: ready ## run the regression tests on both flavours and write dist/proofs/
	@$(CARRY) prove $(WHICH)

leave-one-out: ready ## leave each patch of UPSTREAM= VERSION= FAULT= out: its own tests must miss it; TEXT=1, WHOLE=1, WRITE=1
	@$(CARRY) leave-one-out $(WHICH) --fault "$$FAULT" $(if $(TEXT),--text) $(if $(WHOLE),--whole) $(if $(WRITE),--write)

matrix: ready ## every way to resume UPSTREAM= VERSION=, pairwise; FLAVOUR=pristine, CELLS=pattern
	@$(CARRY) matrix $(WHICH) --flavour "$$FLAVOUR" --cells "$$CELLS"

matrix-full: ready ## the same with every combination: hours
	@$(CARRY) matrix-full $(WHICH) --flavour "$$FLAVOUR" --cells "$$CELLS"

matrix-all: ready ## the matrix of every pin, both flavours
	@$(CARRY) matrix-all $(WHICH)

matrix-slice: ready ## a fixed slice of the matrix on every patched wheel: minutes
	@$(CARRY) matrix-slice $(WHICH)

index: ready ## publish proven wheels to dist/simple/
	@$(CARRY) index $(WHICH)

serve: ready ## serve dist/simple/ on loopback at PORT=
	@$(CARRY) serve --port "$$PORT"

apply: ready ## lay the work tree of UPSTREAM= VERSION= below build/trees/, one commit per patch
	@$(CARRY) apply "$$UPSTREAM" "$$VERSION"

refresh: ready ## export the work tree of UPSTREAM= VERSION= back to its patch files
	@$(CARRY) refresh "$$UPSTREAM" "$$VERSION"

lint: ready ## check every series against the rules
	@$(CARRY) lint $(WHICH)

bench: ready ## measure what the tool and patched loads cost, as ratios; VERSION= of the loads
	@$(CARRY) bench --version "$$VERSION"

bench-load: ready ## only the loads
	@$(CARRY) bench-load --version "$$VERSION"

record: ready ## keep the proofs of this machine in patches/, and the README's table
	@$(CARRY) record $(WHICH)

bump: ready ## judge every patch of PIN= against VERSION= (or latest); TESTS= of each fault, WRITE=1 lays the new pin
	@$(CARRY) bump $(WHICH) --pin "$$PIN" --tests "$$TESTS" $(if $(WRITE),--write)

replay: ready ## carry the set through releases FROM= TO=; BEHAVIOUR= (versions, or all) runs proofs, WRITE=1 mends Affects
	@$(CARRY) replay --upstream "$$UPSTREAM" --from "$$FROM" --to "$$TO" --behaviour "$$BEHAVIOUR" --tests "$$TESTS" $(if $(WRITE),--write)

plan: ready ## print the cells that CI fans out over, one pin and stack each, as JSON
	@$(CARRY) plan --json $(WHICH)

doctor: ready ## look at what this machine has and lacks
	@$(CARRY) doctor

clean: ready ## remove build/ and dist/, but not dist/simple/, unless a work tree holds unexported work
	@$(CARRY) clean

# Cheap where .venv is right. Without PYTHON= it stays on the Python that it was made with.
ready:
	@p='$(PYTHON)'; [ "$$p" ] || { p=.venv/bin/python; [ -x $$p ] || p=python3; }; $$p scripts/bootstrap.py
