# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Makes .venv with torch, this package and its extras; sourced by demo.sh and test.sh.
# `setup_env EXTRA...` prints one line per stage and is quick when nothing changed. What pip
# and the compiler say goes to .venv/setup.log and is shown when a stage fails.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
SETUP_LOG=$VENV/setup.log
TORCH_VERSION=2.13.0
TORCHREC_VERSION=1.8.0
# Seconds that the package index has to answer before anything else is tried; pip itself takes one
# of them to start, and several beside other programs.
NETWORK_CHECK_S=${NETWORK_CHECK_S:-20}

die() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

# stage NAME COMMAND...: runs the command quietly and prints its seconds.
stage() {
  local name=$1 began=$SECONDS
  shift
  printf '%-34s' "$name"
  if ! "$@" >>"$SETUP_LOG" 2>&1 </dev/null; then
    printf 'failed after %s s\n' $((SECONDS - began))
    tail -n 25 "$SETUP_LOG" >&2
    die "$name failed; the whole log is $SETUP_LOG"
  fi
  printf '%4s s\n' $((SECONDS - began))
}

# Prints the folder of site-packages that holds a torch of the wanted release, if any.
torch_folder() {
  "$1" - "${TORCH_VERSION%.*}" <<'PYTHON' 2>/dev/null
import re, sys
from importlib.util import find_spec
from pathlib import Path
spec = find_spec("torch")
if not (spec and spec.submodule_search_locations):
    sys.exit(1)
root = Path(spec.submodule_search_locations[0])
text = (root / "version.py").read_text()
found = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text)
if not found or not found.group(1).startswith(sys.argv[1] + "."):
    sys.exit(1)
print(root.parent)
PYTHON
}

# Sets PYTHON and REUSED: an interpreter with torch if there is one, else any that is new enough.
find_python() {
  local candidate first="" newest=""
  REUSED=""
  for candidate in ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} python3 python3.14 python3.13 \
    python3.12 python3.11; do
    candidate=$(command -v "$candidate") || continue
    [ "$candidate" != "$VENV/bin/python" ] || continue
    newest=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
      continue
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    first=${first:-$candidate}
    if REUSED=$(torch_folder "$candidate"); then
      PYTHON=$candidate
      return
    fi
  done
  [ -n "$newest" ] || die "python3 is not on PATH; install Python 3.11 or newer"
  [ -n "$first" ] || die "Python 3.11 or newer is needed, python3 is $newest; install a newer one"
  PYTHON=$first
}

# Everything that a bare machine may lack, each in one sentence, before anything is made.
check_machine() {
  [ "$(uname -s)" = Linux ] || die "Linux is needed; this is $(uname -s)"
  find_python
  local version
  version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$PYTHON has no venv module; install it (Debian, Ubuntu: apt install python$version-venv)"
  "$PYTHON" -c 'import os, sys, sysconfig as s
sys.exit(not os.path.isfile(os.path.join(s.get_path("include"), "Python.h")))' ||
    die "Python.h is missing; install the headers (Debian, Ubuntu: apt install python$version-dev)"
  check_compiler
  check_disk
}

check_compiler() {
  local compiler=${CXX:-g++}
  command -v "$compiler" >/dev/null ||
    die "$compiler is not on PATH; install g++ 12 or newer (Debian, Ubuntu: apt install g++)"
  echo 'int main() { return [](auto x) requires(sizeof(x) > 0) { return x; }(0); }' |
    "$compiler" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null ||
    die "$compiler does not compile C++20; install g++ 12 or newer and set CXX to it"
}

check_disk() {
  local needed_gib=4 free_kib
  [ -z "$REUSED" ] || needed_gib=2
  free_kib=$(df -Pk "$ROOT" | awk 'NR == 2 {print $4}')
  [ "$free_kib" -ge $((needed_gib * 1024 * 1024)) ] ||
    die "$needed_gib GiB of disk space are needed in $ROOT, $((free_kib / 1024)) MiB are free"
}

# Asks the package index, by the user's own pip settings, for one small file.
check_network() {
  local python=$PYTHON
  "$python" -m pip --version >/dev/null 2>&1 || python=$VENV/bin/python
  timeout "$NETWORK_CHECK_S" "$python" -m pip download --quiet --no-deps --no-input \
    --disable-pip-version-check --retries 0 --timeout "$NETWORK_CHECK_S" \
    -d "$VENV/network-check" setuptools >>"$SETUP_LOG" 2>&1 ||
    die "no package index answers pip within $NETWORK_CHECK_S s and packages are to be fetched;" \
      "check network, proxy and pip's settings (slow but working: NETWORK_CHECK_S=60)"
  rm -rf "$VENV/network-check"
}

# Modules are compiled when they are imported: most never are.
pip_install() {
  "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile "$@"
}

# torch of another environment is used where it lies: its folder joins the path, last.
reuse_torch() {
  local site
  site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n' "$REUSED" >"$site/reused_torch.pth"
  # Programs that pip finds installed there are started from there.
  dirname "$("$PYTHON" -c 'import sys; print(sys.executable)')" >"$VENV/reused_bin"
}

install_torch() {
  local found
  if found=$(torch_folder "$VENV/bin/python"); then
    echo "torch ${TORCH_VERSION%.*} is in $found" >>"$SETUP_LOG"
  elif [ -n "$REUSED" ]; then
    echo "torch: using the one in $REUSED"
    reuse_torch
  else
    echo "torch $TORCH_VERSION is needed and no python3 here has it: pip now fetches it," \
      "0.2 GB for a CPU build, up to 3 GB for the CUDA build that some indexes give"
    stage "torch" pip_install "torch==$TORCH_VERSION"
  fi
}

environment_stamp() {
  cat "$ROOT/pyproject.toml" "$ROOT/setup.py" "$ROOT/scripts/setup_env.sh" |
    sha256sum | cut -d' ' -f1
}

# is_current EXTRA...: true when .venv was made from these files, has these extras, and the torch
# it uses is still there.
is_current() {
  local stamp extra
  stamp=$(environment_stamp)
  for extra in "$@"; do
    [ "$(cat "$VENV/setup-$extra.stamp" 2>/dev/null)" = "$stamp" ] || return 1
  done
  [ -x "$VENV/bin/python" ] && [ -d "$(cat "$VENV/torch_root" 2>/dev/null)/torch" ]
}

make_environment() {
  check_machine
  mkdir -p "$VENV"
  : >"$SETUP_LOG"
  if "$PYTHON" -m pip --version >/dev/null 2>&1; then
    check_network
  fi
  [ -x "$VENV/bin/pip" ] || stage "virtual environment" "$PYTHON" -m venv "$VENV"
  "$PYTHON" -m pip --version >/dev/null 2>&1 || check_network
  stage "build tools" pip_install numpy "setuptools>=77" "cmake>=3.24" ninja
  begin_ahead
  install_torch
  torch_folder "$VENV/bin/python" >"$VENV/torch_root" ||
    die "torch $TORCH_VERSION is not importable in $VENV; see $SETUP_LOG, remove $VENV, try again"
}

# What the package and its extras require, one requirement a line.
requirements() {
  "$VENV/bin/python" - "$@" <<'PYTHON'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
found = project["dependencies"]
for extra in sys.argv[1:]:
    found += project["optional-dependencies"][extra]
print(*dict.fromkeys(found), sep="\n")
PYTHON
}

# install_extras EXTRA...: what they require.
install_extras() {
  requirements "$@" >"$VENV/requirements.txt" && pip_install -r "$VENV/requirements.txt" || return
  # With its requirements it would bring FBGEMM's GPU build over the one of `models`.
  [[ " $* " != *" models "* ]] || pip_install --no-deps "torchrec==$TORCHREC_VERSION"
}

# What a script wants to be built behind all that it runs: a function that runs it, if any.
BUILD_AHEAD=${BUILD_AHEAD:-}
# Each is the process group of a build that runs beside other stages.
CORE=""
AHEAD=""
trap 'end_build "$CORE"; end_build "$AHEAD"' EXIT

# end_build GROUP: ends a build, and waits until all of it has ended: another may follow in its
# folder.
end_build() {
  local deadline=$((SECONDS + 10))
  [ -n "$1" ] || return 0
  while kill -TERM -- "-$1" 2>/dev/null && [ $SECONDS -lt $deadline ]; do
    sleep 0.1
  done
}

# Compiles the core while other stages run.
begin_core() {
  set -m
  python scripts/cmake_build.py >"$VENV/core.log" 2>&1 </dev/null &
  set +m
  CORE=$!
}

finish_core() {
  local status=0
  wait "$CORE" || status=$?
  CORE=""
  cat "$VENV/core.log"
  return $status
}

# Begins what is built ahead, which needs no torch; it takes what the other stages leave.
begin_ahead() {
  [ -n "$BUILD_AHEAD" ] && [ -z "$AHEAD" ] || return 0
  set -m
  "$BUILD_AHEAD" >"$VENV/ahead.log" 2>&1 </dev/null &
  set +m
  AHEAD=$!
}

# What is not built yet is left to whoever needs it: a failure is told then.
end_ahead() {
  end_build "$AHEAD"
  AHEAD=""
}

# setup_env EXTRA...: afterwards `python` and every tool are those of .venv.
setup_env() {
  local extras extra fresh=yes
  extras=$(IFS=,; echo "$*")
  cd "$ROOT" || exit 1
  is_current "$@" || fresh=no
  [ $fresh = yes ] || make_environment
  begin_ahead
  export PATH="$VENV/bin:$PATH"
  [ ! -f "$VENV/reused_bin" ] || PATH="$VENV/bin:$(cat "$VENV/reused_bin"):${PATH#*:}"
  unset PYTHONHOME VIRTUAL_ENV
  hash -r
  check_compiler
  if [ $fresh = yes ]; then
    stage "compiled core" python scripts/cmake_build.py
    return
  fi
  # pip uses one core and the disk: the compiler has the rest meanwhile.
  begin_core
  stage "extras ($extras)" install_extras "$@"
  stage "compiled core, what is left" finish_core
  stage "package" pip_install --no-deps --no-build-isolation -e .
  for extra in "$@"; do
    environment_stamp >"$VENV/setup-$extra.stamp"
  done
}
