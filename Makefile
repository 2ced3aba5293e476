# Every target does the set-up that it needs, and is quick the second time.
PYTHON ?= python3
JOBS ?= $(shell nproc)
# Shards of the Python tests, each in namespaces of its own. One more than there are cores: a third of
# the time a test waits, for a program to make its steps or for a copy that is slow on purpose.
SHARDS ?= $(shell expr $(JOBS) + 1)

PY := .venv/bin/python
# Under an init that is quick: a third of the time would go to waiting for pids to be free.
PYTEST := $(PY) tests/support/reaper.py $(PY) -m pytest --quiet
TURN := $(PY) -m tests.support.turn
LOGS := build/logs
STEP := packaging/step.sh
SOURCES = $(shell find phosd tests bench -name "*.cpp" -o -name "*.h" -o -name "*.cu" 2>/dev/null)
# What threads of a program and of its mover share: the gate, the chunk table, the plan.
THREADED := phosd/hook/all phosd/engine/mover/all
TYPED = $(foreach folder,phosd tests bench examples packaging,$(if $(wildcard $(folder)/*.py),$(folder)))
CMAKE := .venv/bin/cmake
AGAIN := $(MAKE) --no-print-directory
CTEST := .venv/bin/ctest --output-on-failure --no-tests=error --parallel $(JOBS)
CONFIGURE := -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv/bin/ninja -DPython3_EXECUTABLE=$(CURDIR)/$(PY)
export PATH := $(PATH):/usr/sbin:/sbin
export PYTHON

.PHONY: help setup setup-containers setup-slurm build deb noble-deb image wheel lint tidy native-test native-test-plain native-test-sanitized \
	native-test-threads check test test-all begin-test python-test soak flake-hunt durations \
	test-boot demo docs screens test-gpu clean

help:
	@echo "make demo      train a network, checkpoint it, kill -9, restore it, compare"
	@echo "make check     linters, and tests that start no process"
	@echo "make test      all that a change must pass; a part of what is random, another each commit"
	@echo "make test-all  the same, and everything that is random or a product"
	@echo "make soak      what takes hours; goes on where it was interrupted"
	@echo "make flake-hunt  tests again and again beside busy loops; goes on in the same way"
	@echo "make test-boot the Debian package in a booted system: a container with systemd (root)"
	@echo "make test-gpu  the tests that need a real GPU"
	@echo "make setup     virtual environment, system packages, CRIU (the others do it themselves)"
	@echo "make setup-containers  the container runtimes whose containers are tested"
	@echo "make setup-slurm  Slurm, whose jobs are tested; \`make build\` then builds the plugin for it"
	@echo "make build     the native libraries"
	@echo "make deb       the Debian package, in build/; SUITE=noble: for Ubuntu 24.04, in build/noble"
	@echo "make image     the OCI image, in build/: phosd for hosts without Python, or run by Kubernetes"
	@echo "make wheel     the wheel for pip, with the native libraries, in build/"
	@echo "make docs      the pages as a site, in build/site; checks all links"
	@echo "make screens   the pictures of phos-tui and of the dashboard, from a session on this machine (root)"
	@echo "make lint      ruff, mypy, import-linter, lengths of files and functions, clang-format"
	@echo "make tidy      clang-tidy, over a part of what runs in programs and beside them"
	@echo "make clean     remove what was built; the virtual environment and CRIU stay"

# --- set-up

setup: build/.packages .venv/.ready
	@packaging/ensure_criu.sh $(PY)

build/.packages: packaging/system_packages.sh
	@mkdir -p build
	@packaging/system_packages.sh
	@touch $@

.venv/.ready: pyproject.toml packaging/make_venv.sh packaging/requirements.py | build/.packages
	@$(STEP) "virtual environment" $(LOGS)/venv.log packaging/make_venv.sh $(PYTHON) .venv
	@touch $@

# --- build

build: build/.packages .venv/.ready build/native/build.ninja
	@$(STEP) "native build" $(LOGS)/build.log $(CMAKE) --build build/native --parallel $(JOBS)
	@test -f phosd/native/phos_slurm.so || \
	    echo "Slurm's plugin: not built, there is no slurm/spank.h (make setup-slurm)"

build/native/build.ninja: | .venv/.ready
	@$(STEP) "configure" $(LOGS)/configure.log $(CMAKE) -S . -B build/native $(CONFIGURE)

build/threads/build.ninja: | .venv/.ready
	@$(STEP) "configure with the thread sanitizer" $(LOGS)/configure-threads.log \
	    $(CMAKE) -S . -B build/threads $(CONFIGURE) \
	    -DPHOS_SANITIZE=thread -DPHOS_NATIVE_DIR=$(CURDIR)/build/threads/native

# For another release with SUITE=noble, in build/noble.
deb: build
	@rm -f build/$(SUITE)/phosd_*.deb
	@$(STEP) "Debian package$(if $(SUITE), for $(SUITE))" $(LOGS)/deb.log $(PY) packaging/build_deb.py \
	    $(if $(SUITE),--suite $(SUITE) --output build/$(SUITE))

# glibc 2.39 is there; what is built with a newer one does not run.
noble-deb: deb
	@if dpkg --compare-versions "$$(dpkg-query --show --showformat='$${Version}' libc6)" lt 2.40; then \
	    $(AGAIN) deb SUITE=noble; fi

image: deb build/.image-packages
	@rm -f build/phosd_*.oci.tar
	@$(STEP) "OCI image" $(LOGS)/image.log $(PY) packaging/build_image.py build/phosd_*.deb

wheel: build/.packages .venv/.ready
	@$(STEP) "wheel" $(LOGS)/wheel.log packaging/make_wheel.sh build

# What `pip install` fetches for the wheel: tests have no network.
build/wheelhouse: pyproject.toml | wheel
	@rm -rf $@
	@$(STEP) "packages that the wheel needs" $(LOGS)/wheelhouse.log $(PY) -m pip download --quiet \
	    --only-binary=:all: --dest $@ build/phosd-*.whl

# --- tests

lint: .venv/.ready
	@$(STEP) "ruff check" $(LOGS)/ruff.log $(PY) -m ruff check --quiet .
	@$(STEP) "ruff format" $(LOGS)/format.log $(PY) -m ruff format --check --quiet .
	@$(STEP) "mypy" $(LOGS)/mypy.log $(PY) -m mypy $(TYPED)
	@$(STEP) "lint-imports" $(LOGS)/imports.log .venv/bin/lint-imports --no-logo
	@$(STEP) "vocabulary" $(LOGS)/vocabulary.log $(PY) -m tests.support.vocabulary
	@$(STEP) "lengths" $(LOGS)/lengths.log $(PY) -m tests.support.lengths
	@$(STEP) "made pages" $(LOGS)/pages.log $(PY) packaging/make_pages.py --check
	@$(STEP) "clang-format" $(LOGS)/clang-format.log \
	    .venv/bin/clang-format --dry-run --Werror $(SOURCES)

tidy: build
	@$(STEP) "clang-tidy" $(LOGS)/tidy.log $(PY) -m tests.support.tidy $(JOBS)

# The software GPU, a test double, takes more than half of a sanitized build: only test-all sanitizes it.
# The thread sanitizer has to know it: programs and hook wait for each other by its atomics.
BUILT_SOFTGPU = $(if $(PHOS_TEST_ALL),,$(CURDIR)/phosd/native/softgpu)

# What has passed with the same sources, headers, CMake files and compiler is not built or run again.
# Sanitizers take half of the native part: they have a turn, and run when recent commits touch them.
native-test: build
	@packaging/stamped.sh build/native.passed "native tests" $(AGAIN) native-test-plain
	@if $(TURN) "native tests with sanitizers" 2 "phosd/*.cpp" "phosd/*.h"; then \
	    packaging/stamped.sh build/sanitized.passed "native tests with sanitizers" \
	        $(AGAIN) native-test-sanitized BUILT_SOFTGPU=$(BUILT_SOFTGPU); fi
	@if $(TURN) "native tests with the thread sanitizer" 4 "phosd/hook/*" "phosd/engine/mover/*" "phosd/include/*"; then \
	    packaging/stamped.sh build/threads.passed "native tests with the thread sanitizer" \
	        $(AGAIN) native-test-threads; fi

native-test-plain:
	@$(STEP) "native tests" $(LOGS)/ctest.log $(CTEST) --test-dir build/native

native-test-sanitized: .venv/.ready
	@$(STEP) "configure with sanitizers" $(LOGS)/configure-sanitized.log \
	    $(CMAKE) -S . -B build/sanitized $(CONFIGURE) -DPHOS_SANITIZE=address,undefined \
	    -DPHOS_NATIVE_DIR=$(CURDIR)/build/sanitized/native -DPHOS_BUILT_SOFTGPU=$(BUILT_SOFTGPU)
	@$(STEP) "sanitized build" $(LOGS)/build-sanitized.log \
	    $(CMAKE) --build build/sanitized --parallel $(JOBS)
	@$(STEP) "native tests with sanitizers" $(LOGS)/ctest-sanitized.log \
	    $(CTEST) --test-dir build/sanitized

native-test-threads: build/threads/build.ninja
	@$(STEP) "build with the thread sanitizer" $(LOGS)/build-threads.log \
	    $(CMAKE) --build build/threads --parallel $(JOBS) --target $(THREADED)
	@$(STEP) "native tests with the thread sanitizer" $(LOGS)/ctest-threads.log \
	    $(CTEST) --test-dir build/threads --tests-regex "^(hook|mover)_"

check: begin-test build lint
	@$(STEP) "unit tests" - $(PYTEST) tests/unit --isolated $(SHARDS)

test: begin-test setup lint native-test tidy python-test

test-all: export PHOS_TEST_ALL := 1
test-all: begin-test setup setup-slurm lint native-test tidy deb noble-deb image wheel build/wheelhouse build/.release-packages \
	build/.s3-packages build/.prometheus build/.kubernetes-packages build/.container-packages \
	build/.disk-packages build/.site-packages build/criu-protos python-test

begin-test:
	@mkdir -p $(LOGS)
	@rm -f $(LOGS)/steps $(LOGS)/times.json
	@cut -d " " -f 1-3 /proc/loadavg >$(LOGS)/load
	@$(PYTHON) -m tests.support.speed $(LOGS)/speed

# Tests that judge how long something takes run alone.
python-test: setup build
	@$(STEP) "Python tests" - $(PYTEST) -m "not timing" --isolated $(SHARDS) --times $(LOGS)/times.json
	@$(STEP) "Python tests, alone" - $(PYTEST) -m timing --times $(LOGS)/times.json
	@test -n "$(PHOS_TEST_ALL)" || $(PY) -m tests.support.budget $(LOGS)

# CRIU's own descriptions of its images, with which ours are compared.
build/criu-protos: packaging/fetch_criu_protos.py | .venv/.ready
	@$(STEP) "descriptions of CRIU's images" $(LOGS)/criu-protos.log $(PY) packaging/fetch_criu_protos.py $@

# An S3 server to push images to, and what asks it: as much as all else that is set up together.
build/.s3-packages: pyproject.toml packaging/requirements.py | .venv/.ready
	@$(PY) packaging/requirements.py test-s3 >build/s3-packages.txt
	@$(STEP) "packages for S3" $(LOGS)/s3.log $(PY) -m pip install --quiet \
	    --requirement build/s3-packages.txt
	@touch $@

# Prometheus and promtool, for the alerts.
build/.prometheus: packaging/install_prometheus.py | build/.packages
	@$(STEP) "Prometheus" $(LOGS)/prometheus.log $(PYTHON) packaging/install_prometheus.py build/prometheus
	@touch $@

# Kubernetes' schemas, by the digest of what was published.
build/.kubernetes-packages: packaging/kubernetes_schemas.txt pyproject.toml packaging/requirements.py | .venv/.ready
	@$(STEP) "schemas of Kubernetes" $(LOGS)/kubernetes.log $(PY) -m pip install --quiet \
	    --no-deps --requirement packaging/kubernetes_schemas.txt
	@$(PY) packaging/requirements.py test-kubernetes >build/kubernetes-packages.txt
	@$(STEP) "packages for them" $(LOGS)/kubernetes.log $(PY) -m pip install --quiet \
	    --requirement build/kubernetes-packages.txt
	@touch $@

soak flake-hunt: setup build
	@$(PY) -m tests.support.rounds $@

# By how long they took, modules are dealt to shards: to be recorded anew when that has changed.
durations: setup build
	@$(PYTEST) -m "not timing" --isolated $(SHARDS) --record-durations

test-boot: build build/.boot-packages
	@$(PYTEST) tests/boot

build/.release-packages: packaging/system_packages.sh
	@packaging/system_packages.sh release
	@touch $@

build/.disk-packages: packaging/system_packages.sh
	@packaging/system_packages.sh disks
	@touch $@

build/.image-packages: packaging/system_packages.sh
	@packaging/system_packages.sh image
	@touch $@

setup-containers: build/.container-packages

build/.container-packages: packaging/system_packages.sh packaging/install_runtimes.py \
	packaging/requirements.py pyproject.toml | .venv/.ready
	@packaging/system_packages.sh containers
	@$(STEP) "newer runtimes" $(LOGS)/runtimes.log $(PYTHON) packaging/install_runtimes.py build
	@$(PY) packaging/requirements.py test-cri >build/cri-packages.txt
	@$(STEP) "packages for the CRI" $(LOGS)/cri.log $(PY) -m pip install --quiet \
	    --requirement build/cri-packages.txt
	@touch $@

# Its plugin is built where its headers are: what was configured without is configured again. Beside
# the system's, the tests take Debian 13's, which is unpacked.
setup-slurm: build/.slurm-packages

build/.slurm-packages: packaging/system_packages.sh packaging/install_slurm.py
	@packaging/system_packages.sh slurm
	@$(STEP) "Slurm 24.11" $(LOGS)/slurm.log $(PYTHON) packaging/install_slurm.py build/slurm
	@rm -f build/native/CMakeCache.txt build/native/build.ninja
	@touch $@

build/.boot-packages: packaging/system_packages.sh
	@packaging/system_packages.sh boot
	@touch $@

test-gpu: setup build
	@PHOS_GPU=real $(PYTEST) tests/driver tests/node/checkpoint_restore

demo: setup build
	@$(PY) -m phosd.demo

# MkDocs wants all pages, and what they link to, in one folder.
docs: build/.site-packages
	@rm -rf build/pages
	@mkdir -p build/pages
	@cp --recursive --parents README.md CHANGELOG.md CONTRIBUTING.md LICENSE NOTICE docs examples build/pages
	@NO_MKDOCS_2_WARNING=1 $(STEP) "site, build/site/index.html" $(LOGS)/docs.log build/site-venv/bin/mkdocs build --strict --quiet

screens: setup build build/.prometheus
	@$(PY) packaging/make_overview.py
	@$(PY) packaging/make_screens.py
	@$(PY) packaging/make_dashboard.py

build/.site-packages: packaging/site-requirements.txt | build/.packages
	@$(STEP) "packages for the site" $(LOGS)/site-packages.log sh -c "$(PYTHON) -m venv --clear build/site-venv && \
	    build/site-venv/bin/pip install --quiet --requirement packaging/site-requirements.txt"
	@touch $@

clean:
	@rm -rf build phosd/native .pytest_cache .mypy_cache .ruff_cache .import_linter_cache \
	    .hypothesis
