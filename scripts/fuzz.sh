#!/usr/bin/env bash
# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Fuzzes the parsers of the readers and the decoders of the wire under ASan and UBSan: each target
# replays its corpus and mutates it. Its last line says how many inputs ran with which seed;
# build/fuzz.log keeps it.
set -euo pipefail
cd "$(dirname "$0")/.."
# What bash scripts/test.sh has installed, if it was run.
PATH=$PWD/.venv/bin:$PATH

usage() {
  echo "usage: scripts/fuzz.sh [--inputs N | --seconds S] [--seed K] [TARGET...]" >&2
  echo "  N inputs (default 10000000) or S seconds for each target; targets:" >&2
  ls tests/fuzz/corpus >&2
  exit 2
}

LIMIT=(--inputs 10000000)
SEED=1
TARGETS=()
while [ $# -gt 0 ]; do
  case $1 in
    --inputs | --seconds) [ $# -ge 2 ] || usage && LIMIT=("$1" "$2") && shift 2 ;;
    --seed) [ $# -ge 2 ] || usage && SEED=$2 && shift 2 ;;
    -*) usage ;;
    *) [ -d "tests/fuzz/corpus/$1" ] || usage && TARGETS+=("$1") && shift ;;
  esac
done
[ ${#TARGETS[@]} -gt 0 ] || mapfile -t TARGETS < <(ls tests/fuzz/corpus)

BUILD=$(python scripts/cmake_build.py asan fuzzers)
# As many at a time as there are cores: each runs in one thread.
printf '%s\n' "${TARGETS[@]}" |
  xargs -P "$(nproc)" -I{} \
    env "$BUILD/{}" "${LIMIT[@]}" --seed "$SEED" "tests/fuzz/corpus/{}" |
  tee -a build/fuzz.log
