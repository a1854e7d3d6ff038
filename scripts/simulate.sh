#!/usr/bin/env bash
# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Builds and runs the simulator: servers, trainers, network, clocks and disks of one seed in one
# program, with faults, compared with a plain model. Or has it find planted mistakes.
set -euo pipefail
cd "$(dirname "$0")/.."
# What bash scripts/test.sh has installed, if it was run.
PATH=$PWD/.venv/bin:$PATH

usage() {
  cat <<TEXT
usage: bash scripts/simulate.sh [--seeds N] [--from N] [--seconds S] [--jobs J]
       bash scripts/simulate.sh --seed N
       bash scripts/simulate.sh --mutations [--seeds N] [--jobs J] [NAME...]

  --seeds N     so many seeds (default 1000), from --from (default 1) on; a line for each that goes
                wrong, ten at most
  --seconds S   begins no seed after so long
  --jobs J      in so many processes (default: as many as there are cores)
  --seed N      one seed, with all that happens in it; the same events every time
  --mutations   builds the core with one mistake after another of tests/simulator/mutations, those
                named or all, and fails if N seeds (default 20000) do not find one
TEXT
}

SEEDS=
JOBS=$(($(nproc) < 64 ? $(nproc) : 64)) # as many as the program takes
MUTATIONS=false
OPTIONS=()
NAMES=()
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage && exit 0 ;;
    --mutations) MUTATIONS=true && shift ;;
    --seeds) [ $# -ge 2 ] || { usage >&2 && exit 2; } && SEEDS=$2 && shift 2 ;;
    --jobs) [ $# -ge 2 ] || { usage >&2 && exit 2; } && JOBS=$2 && shift 2 ;;
    --from | --seconds | --seed)
      [ $# -ge 2 ] || { usage >&2 && exit 2; }
      OPTIONS+=("$1" "$2") && shift 2
      ;;
    -*) usage >&2 && exit 2 ;;
    *) NAMES+=("$1") && shift ;;
  esac
done

# The files of the checkout, in a build of their own: what is planted is never seen outside of it.
# Only what differs is written, so that only that is compiled.
SCRATCH=build/mutations
copy_sources() {
  git ls-files -z -- CMakeLists.txt CMakePresets.json cmake csrc scripts tests/native \
    tests/simulator tests/fuzz |
    python -c '
import pathlib, sys
for name in filter(None, sys.stdin.read().split("\0")):
    old, new = pathlib.Path(sys.argv[1], name), pathlib.Path(name).read_bytes()
    if not old.is_file() or old.read_bytes() != new:
        old.parent.mkdir(parents=True, exist_ok=True)
        old.write_bytes(new)
' "$SCRATCH"
}

# plant NAME [--reverse]: in the copy.
plant() {
  patch -p1 --silent --no-backup-if-mismatch -d "$SCRATCH" "${2---forward}" \
    <"tests/simulator/mutations/$1.patch"
}

# Builds the copy and runs its seeds; 1: they have found something.
run_seeds() {
  local folder
  folder=$(cd "$SCRATCH" && python scripts/cmake_build.py release simulate) || return 2
  "$folder/simulate" --seeds "${SEEDS:-20000}" --jobs "$JOBS" --failures 1 2>/dev/null
}

# find_mutation NAME: whether the seeds find it.
find_mutation() {
  local said=0 log=$SCRATCH/$1.log
  plant "$1" || { echo "$1: the patch does not fit the sources" && return 1; }
  run_seeds >"$log" || said=$?
  plant "$1" --reverse
  case $said in
    0) echo "$1: NOT FOUND by ${SEEDS:-20000} seeds" && return 1 ;;
    1) echo "$1: $(grep -m1 '^seed' "$log")" ;;
    *) echo "$1: could not be built or run" && return 1 ;;
  esac
}

if $MUTATIONS; then
  [ ${#OPTIONS[@]} = 0 ] || { usage >&2 && exit 2; }
  if [ ${#NAMES[@]} = 0 ]; then
    for patch in tests/simulator/mutations/*.patch; do
      NAMES+=("$(basename "$patch" .patch)")
    done
  fi
  copy_sources
  FOUND=0
  for name in "${NAMES[@]}"; do
    find_mutation "$name" && FOUND=$((FOUND + 1))
  done
  echo "$FOUND found, $((${#NAMES[@]} - FOUND)) not found"
  [ "$FOUND" = ${#NAMES[@]} ]
  exit
fi

[ ${#NAMES[@]} = 0 ] || { usage >&2 && exit 2; }
BUILD=$(python scripts/cmake_build.py release simulate)
[[ " ${OPTIONS[*]} " == *" --seed "* ]] || OPTIONS+=(--seeds "${SEEDS:-1000}" --jobs "$JOBS")
"$BUILD/simulate" "${OPTIONS[@]}"
