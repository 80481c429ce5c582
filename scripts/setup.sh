#!/usr/bin/env bash
# Set up the environments of the Makefile's targets; returns at once if nothing has changed.
#
#   scripts/setup.sh uv         .venv with Python 3.11 and the pinned installer
#   scripts/setup.sh engine     ... plus the CPU engine, tokenwire itself and the demo's dependencies  (make demo)
#   scripts/setup.sh dev        ... plus the tools for tests and checks                                (make test, make lint)
#   scripts/setup.sh languages  ... plus the toolchains of examples/{node,cpp,go}, from npm and apt    (make test)
#   scripts/setup.sh packages   only the apt packages of these toolchains, for use with sudo
#   scripts/setup.sh bench      the engine, and .venv-bench with the benchmark's contenders and plots  (make bench)
#   scripts/setup.sh generate   .venv-generate with the stub generator                                 (make generate)
#
# Optional environment variables: PYTHON, the interpreter to use; PIP_FIND_LINKS, folders with wheels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

info() { printf 'set-up: %s\n' "$*" >&2; }
die() { printf 'set-up: error: %s\n' "$*" >&2; exit 1; }

check_platform() {
    local system machine glibc
    system=$(uname -s) machine=$(uname -m)
    [[ $system == Linux && $machine == x86_64 ]] ||
        die "the CPU engine has wheels for Linux on x86-64 only; this is $system on $machine."
    # Prints "glibc 2.36"; fails with another C library.
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2) || glibc=
    [[ -n $glibc ]] || die "the CPU engine needs glibc 2.34 or later; this system's C library is not glibc."
    [[ $(printf '%s\n' 2.34 "$glibc" | sort -V | head -n1) == 2.34 ]] ||
        die "the CPU engine needs glibc 2.34 or later (Debian 12, Ubuntu 22.04, RHEL 9); this system has $glibc."
}

is_python_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3 python; do
        if is_python_311 "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    die "no Python 3.11 found: install it, or set its path with 'make ... PYTHON=/path/to/python3.11'."
}

# Create the virtual environment $1 unless it exists and works.
ensure_venv() {
    local python
    if is_python_311 "$1/bin/python"; then return; fi
    python=$(find_python)
    info "creating $1 with $("$python" --version)"
    "$python" -m venv --clear "$1" ||
        die "'$python -m venv' failed; on Debian and Ubuntu it needs the package python3.11-venv."
}

# Run the command "$3..." as step $2 of environment $1, unless it has succeeded before with the same input files ($inputs).
once() {
    local stamp="$1/.tokenwire-$2" digest
    digest=$(cat -- "${inputs[@]}" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)
    if [[ -f $stamp && $(<"$stamp") == "$digest" ]]; then return; fi
    rm -f -- "$stamp"
    "${@:3}"
    printf '%s\n' "$digest" >"$stamp"
}

install_uv() {
    info "installing the installer uv (25 MB, a few seconds)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
        --requirement requirements/uv.lock ||
        die "pip could not install uv (requirements/uv.lock): is the package index reachable? See pip's message above."
}

# uv reads neither pip's configuration nor its environment variables, so pass the folders with wheels.
find_links=()
for folder in ${PIP_FIND_LINKS:-}; do find_links+=(--find-links "$folder"); done

# Install the lock file $2 into the environment $1, with further options. Omits the package list from uv's output.
install_lock() {
    .venv/bin/uv pip install --python "$1/bin/python" --no-deps --require-hashes --compile-bytecode \
        "${find_links[@]}" --requirement "$2" "${@:3}" 2>&1 | sed -u '/^ [-+~] /d' >&2
}

install_engine() {
    local log
    info "installing the CPU engine, vLLM and torch among 160 packages (3.5 GB on disk; one to three minutes)"
    log=$(mktemp)
    # shellcheck disable=SC2064  # expand the name now
    trap "rm -f -- '$log'" EXIT
    if install_lock .venv requirements/engine-cpu.lock 2>&1 | tee "$log" >&2; then return; fi
    grep -q 'no version of torch==' "$log" || die "uv could not install requirements/engine-cpu.lock; see its message above."
    info "the configured package index has no CPU build of torch; retrying with PyTorch's CPU index"
    install_lock .venv requirements/engine-cpu.lock --torch-backend cpu ||
        die "uv could not install requirements/engine-cpu.lock with PyTorch's CPU index either; see its message above."
}

install_dev() {
    info "installing the tools for tests and checks (60 MB, a few seconds)"
    install_lock .venv requirements/dev.lock || die "uv could not install requirements/dev.lock; see its message above."
}

# Not into .venv, where the tests run: vLLM loads the plug-in smg-grpc-servicer wherever it is installed.
install_bench() {
    info "installing the benchmark's contenders and plots into .venv-bench (150 MB, a few seconds)"
    install_lock .venv-bench requirements/bench.lock || die "uv could not install requirements/bench.lock; see its message above."
    printf 'import site; site.addsitedir("%s")\n' "$PWD/.venv/lib/python3.11/site-packages" \
        >.venv-bench/lib/python3.11/site-packages/tokenwire-engine.pth
}

install_generate() {
    info "installing the stub generator into .venv-generate (15 MB, a few seconds)"
    install_lock .venv-generate requirements/generate.lock ||
        die "uv could not install requirements/generate.lock; see its message above."
}

# The compilers and the stub generators of examples/cpp and examples/go.
language_packages=(
    g++ cmake make pkg-config protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libgrpc++-dev
    golang-go golang-google-grpc-dev golang-google-protobuf-dev protoc-gen-go protoc-gen-go-grpc
)

install_packages() {
    local package missing=()
    command -v apt-get >/dev/null ||
        die "the tests of clients in other languages need Debian 12, Ubuntu 24.04 or later; 'make test-fast' does not."
    for package in "${language_packages[@]}"; do
        # Prints "ii " for an installed package, and fails for an unknown one.
        [[ $(dpkg-query --show --showformat '${db:Status-Abbrev}' "$package" 2>/dev/null) == ii* ]] || missing+=("$package")
    done
    if ((${#missing[@]} == 0)); then return; fi
    ((EUID == 0)) || die "packages are missing (${missing[*]}); run: sudo scripts/setup.sh packages"
    info "installing compilers and gRPC for the C++ and Go examples from apt (half a minute, 700 MB on disk)"
    apt-get update --quiet --quiet || die "'apt-get update' failed; see its message above."
    DEBIAN_FRONTEND=noninteractive apt-get install --option DPkg::Lock::Timeout=120 \
        --yes --quiet --quiet --no-install-recommends "${missing[@]}" >/dev/null ||
        die "apt-get could not install ${missing[*]}; see its message above."
}

check_node() {
    node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null && command -v npm >/dev/null ||
        die "the tests of clients in other languages need Node.js 20 or later, with npm."
}

install_node_modules() {
    info "installing the packages of the TypeScript example into examples/node/node_modules (80 MB, a few seconds)"
    npm ci --prefix examples/node --no-audit --no-fund --loglevel=error >/dev/null ||
        die "npm could not install examples/node/package-lock.json; see its message above."
}

# Downloads nothing: the build backend is in the engine's lock file.
install_tokenwire() {
    info "installing tokenwire itself as an editable package"
    .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable . ||
        die "uv could not install tokenwire from this folder; see its message above."
}

level_uv() {
    ensure_venv .venv
    inputs=(requirements/uv.lock) && once .venv uv install_uv
}

level_engine() {
    check_platform
    level_uv
    inputs=(requirements/engine-cpu.lock) && once .venv engine install_engine
    inputs=(pyproject.toml client/tokenwire/_version.py) && once .venv tokenwire install_tokenwire
}

level_dev() {
    level_engine
    inputs=(requirements/dev.lock) && once .venv dev install_dev
}

level_packages() {
    install_packages
}

level_languages() {
    check_node
    level_packages
    level_dev
    inputs=(examples/node/package-lock.json) && once examples/node/node_modules npm install_node_modules
}

level_bench() {
    level_engine
    ensure_venv .venv-bench
    inputs=(requirements/bench.lock) && once .venv-bench bench install_bench
}

level_generate() {
    level_uv
    ensure_venv .venv-generate
    inputs=(requirements/generate.lock) && once .venv-generate generate install_generate
}

# Concurrent set-ups would overwrite each other.
if command -v flock >/dev/null; then
    exec 9<scripts/setup.sh
    flock --nonblock 9 || { info "waiting for another set-up of this folder to finish"; flock 9; }
fi

case "${1:-}" in
    uv | engine | dev | languages | packages | bench | generate) "level_$1" ;;
    *) die "usage: scripts/setup.sh uv|engine|dev|languages|packages|bench|generate" ;;
esac
