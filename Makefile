# Targets to build, test and measure. They need Go and make. race also needs a C
# compiler, and arm64 an emulator.

GO       ?= go
RANKS    ?= 4
FUZZTIME ?= 10s
FUZZBUILD ?= -fuzz .
TIMEOUT  ?= 1h
PROCS    ?= 4
BENCH    ?= .
COUNT    ?= 1
WORLD    ?= 2
OP       ?= all_reduce
SIZES    ?= 4,1K,64K,1M,16M
PYTHON   ?= /usr/bin/python3
TESTARGS ?=
PACKAGES ?= ./...
INTEROP  ?=
JUDGE    ?=

STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.7.0
GOTESTSUM   = gotest.tools/gotestsum@v1.13.0

# go test, and then the tests that failed or were skipped, with their reasons. Tests wait most of the time: so PROCS
# packages run at a time, and 16 parallel tests of each.
TEST = $(GO) run $(GOTESTSUM) --format standard-quiet --packages "$(PACKAGES)" -- -p $(PROCS) -parallel 16 -timeout $(TIMEOUT)

# Everything must compile on VETTED with its tests, and on TYPECHECKED. 386 finds numbers that do not fit
# an int of 32 bits, Windows finds uses of Unix. To compile for one more platform takes minutes, because the
# standard library comes first.
VETTED      = linux/386 windows/amd64
TYPECHECKED = linux/arm64 darwin/arm64 freebsd/amd64

# The nested modules.
#   make nested NESTED=interop
NESTED = $(patsubst ./%/go.mod,%,$(shell find . -mindepth 2 -name go.mod))

# Nested modules that make lint covers, because they depend on little but the core.
OWN = weights examples/torch/serve tools interop interop/judge

.PHONY: help demo build test nightly race arm64 386 nested gpu gorgonia figures pictures release-check kernels lint fuzz bench bench-peers cover interop judge

help: ## print this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 13

demo: ## train a classifier on RANKS=4 ranks; the last line is the result
	@echo "compiling the demo: a minute the first time, seconds after that" >&2
	@$(GO) build -o bin/demo/ ./cmd/c10d ./examples/ddp
	@bin/demo/c10d run -n $(RANKS) -no-prefix -- bin/demo/ddp

build: ## compile everything; the programs go to bin/
	$(GO) build ./...
	$(GO) build -o bin/ ./cmd/...
	$(GO) build -C weights ./...
	$(GO) build -C examples/torch/serve -o /dev/null .
	$(GO) build -C tools -o $(CURDIR)/bin/ ./...
	$(GO) build -C interop -o $(CURDIR)/bin/ .

test: ## all tests; lists those that were skipped, and why
	@$(TEST) $(TESTARGS)

# A package has the CPUs for itself, because long forms measure. GORACE is for processes that tests start.
nightly: export GORACE = atexit_sleep_ms=10
nightly: ## long forms of all tests, the race detector, fuzz targets, PyTorch ranks and tests; takes hours
	C10D_NIGHTLY=1 $(MAKE) test TIMEOUT=6h TESTARGS='-count 1' PROCS=1
	C10D_NIGHTLY=1 $(MAKE) nested TIMEOUT=6h
	$(MAKE) race TIMEOUT=3h
	$(MAKE) nested TESTARGS=-race
	$(MAKE) fuzz FUZZTIME=1m
	$(MAKE) interop
	$(MAKE) judge

race: ## all tests under the race detector
	@CGO_ENABLED=1 $(TEST) -race $(TESTARGS)

# The emulated processor has only Armv8.0. A program there cannot start another one, so
# TestSwitchOff runs by itself.
ARM64    = GOOS=linux GOARCH=arm64 CGO_ENABLED=0 $(GO)
EMULATOR = qemu-aarch64-static -cpu cortex-a53

arm64: ## test the kernels for arm64 under Debian's qemu-user-static
	$(ARM64) vet ./internal/reduce ./internal/transport/shm
	$(ARM64) build ./internal/transport/shm
	$(ARM64) test -count 1 -timeout $(TIMEOUT) -short -exec '$(EMULATOR)' ./internal/reduce
	$(ARM64) test -count 1 -timeout $(TIMEOUT) -run SwitchOff \
	  -exec 'env GODEBUG=cpu.asimd=off REDUCE_TEST_SETS= $(EMULATOR)' ./internal/reduce

# Numbers that do not fit an int of 32 bits. An amd64 system runs the tests itself. Left out are tests of times,
# of processes and of PyTorch, which have no such numbers and take minutes.
SLOW386 = Torch|OnEveryWire|Fault|AreNamed|BrokenLink|WithoutARank|LosesKeys|Deaths|TenJobs|Schedules|Mpiruns|TakeTheirKeys

386: ## short tests of the packages that users call, as a program of 32 bits
	@export GOARCH=386 CGO_ENABLED=0; packages="./tensor ./store/... ./pg ./backend/gloo/..."; mkdir -p bin; \
	$(GO) test -c -o bin/386.test ./tensor; bin/386.test -test.run '^$$' >/dev/null 2>&1; \
	if [ $$? = 126 ]; then echo "this kernel runs no program of 32 bits: vet alone"; exec $(GO) vet $$packages; fi; \
	$(GO) test -count 1 -p $(PROCS) -parallel 16 -timeout $(TIMEOUT) -short -skip '$(SLOW386)' $$packages

nested: ## vet and test the nested modules, or NESTED="tools interop"
	@set -e; for dir in $(NESTED); do echo "module $$dir"; \
	  (cd $$dir && $(GO) vet ./... && $(TEST) -count 1 $(TESTARGS)); done

gpu: ## build the tests that need GPUs into bin/gpu; bin/gpu/run runs them on a machine without Go
	@mkdir -p bin/gpu
	CGO_ENABLED=0 $(GO) test -c -o bin/gpu/direct.test ./backend/cuda/internal/direct
	CGO_ENABLED=0 $(GO) test -c -o bin/gpu/cuda.test ./backend/cuda
	CGO_ENABLED=0 $(GO) test -c -o bin/gpu/ddp.test ./ddp/gpu
	cp backend/cuda/gpu.sh bin/gpu/run

# The header and the libraries are the project's own. Linked programs load the driver's library. With
# the linker's, cu ends them at once with error 34, which shows that they load. The example also
# runs on a driver in software, which has no kernels.
GORGONIA = $(CURDIR)/backend/cuda/gorgonia
STUB     = $(CURDIR)/bin/cuda

gorgonia: ## compile the driver on gorgonia.org/cu and its tests, run its example; needs a C compiler
	$(GORGONIA)/stub/stub.sh $(STUB)
	cd $(GORGONIA) && ./workspace.sh $(STUB) && \
	  export CGO_ENABLED=1 CGO_CFLAGS=-I$(GORGONIA)/stub CGO_LDFLAGS=-L$(STUB) && \
	  $(GO) vet -tags cuda ./... && $(GO) test -c -tags cuda -o $(CURDIR)/bin/gorgonia.test . && \
	  $(GO) build -tags cuda -o $(CURDIR)/bin/gorgonia-allreduce ./allreduce && \
	  GOWORK=$(STUB)/go.work \
	  $(GO) test -c -tags cuda -overlay $(STUB)/overlay.json -o $(CURDIR)/bin/cuda-gorgonia.test ..
	@set -e; for program in gorgonia.test gorgonia-allreduce cuda-gorgonia.test; do \
	  LD_LIBRARY_PATH=$(STUB) bin/$$program 2>&1 | grep -q 'UnknownErrorCode:34' || \
	  { echo "bin/$$program does not load"; exit 1; }; done
	LD_LIBRARY_PATH=$(STUB)/fake bin/gorgonia-allreduce
	LD_LIBRARY_PATH=$(STUB)/fake bin/gorgonia.test -test.run '^Test(Queues|LaunchParameters|OtherContext)$$'

figures: ## write the figures of README.md and docs from docs/benchmarks/*.jsonl
	$(GO) run -C tools ./figures

pictures: ## docs/debug.png, the page of a job with a late rank, by Debian's chromium; bin/pictures has its other forms
	@mkdir -p bin/pictures
	cd trace/debug/browser && C10D_TEST_PICTURES=$(CURDIR)/bin/pictures $(GO) test -count 1 -run TestStuckRank .
	cp bin/pictures/debug.png docs/debug.png

release-check: ## build programs outside the tree with the last commit's modules, from a proxy made here
	$(GO) run -C tools ./release

kernels: ## compile the CUDA kernels to PTX, with Debian's clang-19
	backend/cuda/ptx.sh

lint: ## format, vet, staticcheck, other platforms, rules of the tree
	@out=$$(gofmt -l .); test -z "$$out" || { echo "not formatted:"; echo "$$out"; exit 1; }
	$(GO) mod tidy -diff
	$(GO) vet ./...
	$(GO) run $(STATICCHECK) ./...
	@set -e; for dir in $(OWN); do echo "tidy, vet and staticcheck in $$dir"; \
	  (cd $$dir && $(GO) mod tidy -diff && $(GO) vet ./... && $(GO) run $(STATICCHECK) ./...); done
	$(GO) test -C tools -count 1 ./figures
	$(GO) test -count 1 ./internal/rules
	$(GO) run ./internal/typecheck $(TYPECHECKED)
	cd weights && $(GO) run $(CURDIR)/internal/typecheck $(TYPECHECKED)
	@mkdir -p bin; set -e; for p in $(VETTED); do echo "vet ./... for $$p, link cmd/c10d"; \
	  export GOOS=$${p%/*} GOARCH=$${p#*/} CGO_ENABLED=0; \
	  $(GO) vet ./...; $(GO) vet -C weights ./...; $(GO) build -o bin/linked ./cmd/c10d; rm bin/linked; done

# A package is compiled once for all its targets. With FUZZBUILD= it is compiled as for tests, and the fuzzer
# does not see which code an input reaches. Go's fuzzer sometimes reports the end of its time as a
# failure ("context deadline exceeded"). A real finding is in testdata afterwards and fails again.
FUZZ = -test.fuzztime $(FUZZTIME) -test.timeout 0 -test.fuzzcachedir $$($(GO) env GOCACHE)/fuzz/$$($(GO) list .)

fuzz: ## every fuzz target for FUZZTIME=10s
	@set -e; n=0; for dir in $$(grep -rl --include='*_test.go' '^func Fuzz' . | xargs -n 1 dirname | sort -u); do \
	  cd $$dir; program=$(CURDIR)/bin/fuzz.test; $(GO) test -c $(FUZZBUILD) -o $$program .; \
	  for target in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' *_test.go); do \
	    echo "fuzz $$dir $$target"; n=$$((n+1)); \
	    $$program -test.run '^$$' -test.fuzz "^$$target\$$" $(FUZZ) || { echo again; \
	    $$program -test.run "^$$target\$$" -test.fuzz "^$$target\$$" $(FUZZ); }; \
	  done; cd $(CURDIR); rm bin/fuzz.test; done; echo "$$n fuzz targets"; test $$n -gt 0

bench: ## the packages' benchmarks; BENCH=regexp, COUNT=10 for benchstat
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem -count $(COUNT) ./...

bench-peers: ## this library, PyTorch's gloo and Open MPI, in turn; WORLD=2 OP=all SIZES=4,1K PASSES=3
	@WORLD='$(WORLD)' OP='$(OP)' SIZES='$(SIZES)' PYTHON='$(PYTHON)' GO='$(GO)' bench/peers.sh

cover: ## test coverage; details in coverage.out
	@$(TEST) -coverpkg ./... -coverprofile coverage.out $(TESTARGS)
	@$(GO) tool cover -func coverage.out | tail -1

interop: ## Go ranks beside PyTorch ranks: Debian 12's 1.13 and, as root, Debian 13's 2.6; INTEROP=-quick
	@mkdir -p bin
	$(GO) run -C interop . -python $(PYTHON) -label 1.13.1 $(INTEROP) -json ../bin/interop-1.13.json
	$(GO) run -C interop . -python "./debian13 python3" -label 2.6.0 $(INTEROP) -json ../bin/interop-2.6.json
	@$(GO) run -C interop . -table ../bin/interop-1.13.json ../bin/interop-2.6.json

judge: ## PyTorch's own tests, with this library in gloo's place; needs what interop needs, and a C compiler; JUDGE='-run X'
	@mkdir -p bin
	$(GO) run -C interop/judge . -python $(PYTHON) -label 1.13.1 $(JUDGE) -json ../../bin/judge-1.13.json
	$(GO) run -C interop/judge . -python "../debian13 python3" -label 2.6.0 $(JUDGE) -json ../../bin/judge-2.6.json
	@$(GO) run -C interop/judge . -table ../../bin/judge-1.13.json ../../bin/judge-2.6.json
