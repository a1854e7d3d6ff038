#!/usr/bin/env bash
# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Builds, lints and tests everything, prints the seconds of each stage, and fails if one did.
set -uo pipefail
source "$(dirname "$0")/setup_env.sh"

usage() {
  cat <<TEXT
usage: bash scripts/test.sh [--quick | --integrations | --long]

  no option       everything that must pass before a change is merged, but for what needs other
                  projects and programs
  --quick         linters, native tests without sanitizers, and the Python tests that start no
                  processes of several ranks: the inner loop, at most 150 s after a build
  --integrations  the tests against what other projects have made; a skip fails it, but for want
                  of a CUDA device or of the right to make network namespaces
                    extras, which this command installs: models (deepctr-torch, torch-rechub,
                    torchrec), ccl (oneCCL), integrations (a Jupyter kernel, an S3 server,
                    TensorBoard, Lightning, Accelerate, Ray), serving (FastAPI, ONNX Runtime)
                    apt install iproute2, and the right to make network namespaces: several hosts
                    apt install prometheus: the dashboard's queries
                    apt install openmpi-bin: ranks that mpirun starts
                    apt install slurm-wlm munge: a cluster of two nodes on this host
                    apt install chromium: the site in a browser
                  They run here only; before a change of what they touch is merged
  --long          fuzzing by ten millions of inputs for each parser and decoder; jobs that are
                  killed 20 times in every layout and go on from their snapshots; servers of a job
                  of their own that are killed 50 times; 50 ranks and 2,000 strangers on one
                  machine; how long survivors take to be told of every kind of loss; 100,000
                  simulations, and the mistakes that they must find
TEXT
}

WHAT=all
case ${1-} in
  "") ;;
  --quick | --integrations | --long) WHAT=${1#--} ;;
  --help | -h) usage && exit 0 ;;
  *) usage >&2 && exit 2 ;;
esac
[ $# -le 1 ] || { usage >&2 && exit 2; }

TABLE=()
FAILED=0
# The stages that run beside each other; what they say goes to a folder.
BESIDE=()
BESIDE_IDS=()
SAID=build/beside
# A hundred processes import the package: compiled once, whatever the caller's setting.
export PYTHONDONTWRITEBYTECODE=

# check NAME COMMAND...: runs one stage and remembers how it went; later stages run anyway.
check() {
  local name=$1 began=$SECONDS verdict=ok
  shift
  echo "== $name"
  "$@" </dev/null || { verdict=FAILED && FAILED=1; }
  TABLE+=("$(printf '%-28s %5s s  %s' "$name" $((SECONDS - began)) "$verdict")")
}

format_check() {
  find csrc tests -name '*.cpp' -o -name '*.h' | sort | xargs clang-format --dry-run -Werror
}

# The programs of the sanitizers, with the least of priorities.
build_ahead() {
  local python=$VENV/bin/python
  renice -n 19 -p "$BASHPID" >/dev/null || return 1
  "$python" scripts/cmake_build.py asan native_tests fuzzers &&
    "$python" scripts/cmake_build.py tsan native_tests
}

# native_tests PRESET: builds and runs them.
native_tests() {
  local folder
  folder=$(python scripts/cmake_build.py "$1" native_tests) || return 1
  # Two for each core: they wait more than they compute. The limit is that of a hang, beside other
  # programs, under TSan, too.
  timeout 1800 "${RUNNER[@]}" "$folder/native_tests" --jobs "$((2 * $(nproc)))"
}

# beside NAME COMMAND...: begins a stage that uses one core or waits often; `beside_done` waits for
# all of them, shows what each said and remembers how it went.
beside() {
  local name=$1 number=${#BESIDE[@]}
  shift
  BESIDE+=("$name")
  mkdir -p "$SAID"
  rm -f "$SAID/$number.status"
  {
    SECONDS=0
    "$@" </dev/null >"$SAID/$number.log" 2>&1
    echo "$? $SECONDS" >"$SAID/$number.status"
  } &
  BESIDE_IDS+=($!)
}

beside_done() {
  local number status seconds verdict
  wait "${BESIDE_IDS[@]}" || true
  for number in "${!BESIDE[@]}"; do
    echo "== ${BESIDE[number]}"
    cat "$SAID/$number.log"
    status=1 seconds=0 verdict=ok
    read -r status seconds <"$SAID/$number.status" || true
    [ "$status" = 0 ] || { verdict=FAILED && FAILED=1; }
    TABLE+=("$(printf '%-28s %5s s  %s' "${BESIDE[number]}" "$seconds" "$verdict")")
  done
  BESIDE=() BESIDE_IDS=()
}

# Seeds that the native tests do not have. It goes on compiling what these need, too.
simulations() {
  bash scripts/simulate.sh --from 1001 --seeds 100000 --seconds 60 --jobs 1
}

# With what else is begun beside them.
lint() {
  beside "mypy --strict" python -m mypy
  beside "tidy" python scripts/tidy.py
  beside "ruff check" ruff check .
  beside "ruff format" ruff format --check --quiet .
  beside "clang-format" format_check
  beside_done
}

# More at a time than cores: tests often wait, but they measure time, too, and start processes. The
# slow ones come first, a file stays together.
python_tests() {
  local workers=$(($(nproc) < 4 ? $(nproc) + 1 : 4))
  python -m pytest -q -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
}

# No test of other projects' programs is an outcome, not a failure; pytest ends with 5 then. What
# can be installed must not be missing.
integration_tests() {
  local status=0
  python_tests --ignore "$RAY" --may-skip "CUDA device" \
    --may-skip "network namespaces are not allowed" -rfEs -m integrations || status=$?
  [ $status = 5 ] || return $status
  echo "no test has the marker integrations: nothing was tested"
}

# Ray's daemons give each other up beside other tests.
RAY=tests/integrations/test_ray.py
ray_tests() {
  python -m pytest -q -rfEs --may-skip "CUDA device" "$RAY"
}

# Jobs that a run of all tests kills twice in every layout.
killed_jobs() {
  CPUDIST_TEST_KILLS=20 python -m pytest -q -n 2 tests/snapshot_jobs/test_kills.py
}

# Servers that are killed beside trainers who go on; a run of all tests kills one of them once.
killed_servers() {
  CPUDIST_TEST_KILLS=50 python -m pytest -q -s tests/faults/servers_killed_often.py
}

# Ranks, strangers and pushes beyond what the machine is made for.
overload() {
  python -m pytest -q -s tests/faults/overloaded.py
}

# Prints the figures of docs/guarantees.md, "How long survivors wait".
losses_by_phase() {
  python -m pytest -q -s -rs tests/faults/losses_by_phase.py
}

# ThreadSanitizer of older compilers does not know where newer kernels put things.
RUNNER=(env)
setarch "$(uname -m)" -R true 2>/dev/null && RUNNER=(setarch "$(uname -m)" -R)

began=$SECONDS
EXTRAS=(plot docs test ccl data monitor)
[ "$WHAT" != all ] || BUILD_AHEAD=build_ahead
[ "$WHAT" != integrations ] || EXTRAS+=(models integrations serving)
setup_env "${EXTRAS[@]}"
TABLE+=("$(printf '%-28s %5s s  %s' "environment and build" $((SECONDS - began)) ok)")

case $WHAT in
  all)
    beside "simulations" simulations
    beside "native tests" native_tests release
    lint
    # Tests wait often: meanwhile the programs of the sanitizers are compiled.
    check "pytest" python_tests -m "not integrations"
    end_ahead
    beside "native tests, ASan+UBSan" native_tests asan
    beside "native tests, TSan" native_tests tsan
    beside_done
    check "fuzzing" bash scripts/fuzz.sh --seconds 6
    ;;
  quick)
    beside "native tests" native_tests release
    lint
    check "pytest, in one process" python_tests -m "not processes and not integrations"
    ;;
  integrations)
    check "pytest, integrations" integration_tests
    check "pytest, Ray" ray_tests
    ;;
  long)
    check "pytest, 20 kills a layout" killed_jobs
    check "pytest, 50 servers killed" killed_servers
    check "pytest, overload" overload
    check "pytest, losses by phase" losses_by_phase
    check "simulations" bash scripts/simulate.sh --seeds 100000
    check "mistakes in simulations" bash scripts/simulate.sh --mutations
    check "fuzzing" bash scripts/fuzz.sh --inputs 10000000
    ;;
esac

printf '\n'
printf '%s\n' "${TABLE[@]}"
printf '%-28s %5s s\n' "all" "$SECONDS"
exit $FAILED
