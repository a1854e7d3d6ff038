#!/usr/bin/env bash
# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Builds, lints and tests everything, prints the seconds of each stage, and fails if one did.
set -uo pipefail
source "$(dirname "$0")/setup_env.sh"

if [ $# -ne 0 ]; then
  echo "usage: bash scripts/test.sh" >&2
  [ "$1" = --help ] && exit 0
  exit 2
fi

TABLE=()
FAILED=0
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

native_tests() {
  local program
  program=$(python scripts/native_build.py tests "$@") || return 1
  timeout 300 "${RUNNER[@]}" "$program" --jobs "$(nproc)"
}

began=$SECONDS
setup_env plot docs test models ccl data
TABLE+=("$(printf '%-28s %5s s  %s' "environment and build" $((SECONDS - began)) ok)")

# ThreadSanitizer of older compilers does not know where newer kernels put things.
RUNNER=(env)
setarch "$(uname -m)" -R true 2>/dev/null && RUNNER=(setarch "$(uname -m)" -R)

check "ruff check" ruff check .
check "ruff format" ruff format --check --quiet .
check "mypy --strict" python -m mypy
check "clang-format" format_check
check "tidy" python scripts/tidy.py
check "native tests" native_tests
check "native tests, ASan+UBSan" native_tests --sanitize address,undefined
check "native tests, TSan" native_tests --sanitize thread
check "fuzzing" bash scripts/fuzz.sh --seconds 6
# More at a time than cores: tests often wait, but they measure time, too, and start processes. The
# slow ones come first, a file stays together.
workers=$(($(nproc) < 4 ? $(nproc) + 1 : 4))
check "pytest" python -m pytest -q -n "$workers" --dist loadfile --no-loadscope-reorder

printf '\n'
printf '%s\n' "${TABLE[@]}"
printf '%-28s %5s s\n' "all" "$SECONDS"
exit $FAILED
