#!/usr/bin/env bash
# Does on a Hopper machine what users do: installs a clean copy of the source with pip, and then runs tests, sanitizers,
# benchmarks and a profile of the installed package from another folder. Each part has its own time limit.
#
#   TESTS=1 SANITIZE=1 BENCH=full OUT=/tmp/results tools/device_suite.sh
#
# The suite needs no network. Put wheels that the machine's Python lacks into .wheels/: setuptools, ninja or pybind11 if
# they are missing or too old. PYTHON is the Python whose torch is used (python3).
#   CARRIED   1 to use the checkout and its dash_attn/_C*.so without installing; faster during development
#   INSTALL_TIMEOUT  seconds, 180
#   WORK      a folder that keeps the installation; a later call with the same folder and sources reuses it
# Parts, off unless set:
#   GOLDEN    1 to compute the golden bits again before the tests: golden_bits.json   GOLDEN_TIMEOUT    seconds, 60
#   TESTS     1 for tests/gpu, or arguments for pytest ("tests -k margin")            TESTS_TIMEOUT     seconds, 300
#   TESTS_JOBS  processes that share the tests, 1; tests that occupy SMs run afterwards in one process
#   SANITIZE  1 for "memcheck racecheck synccheck", or some of them                   SANITIZE_TIMEOUT  seconds, 120
#   SANITIZE_JOBS  processes per tool that share the calls, 1          SANITIZE_ARGS  for tests/gpu/sanitizer_case.py
#   BENCH     quick, full or bar                                                      BENCH_TIMEOUT     seconds, 240
#   BENCH_ARGS     for benchmarks.run ("--pass backward forward")
#   BASELINE  an older _C*.so: fingerprints of both binaries, and both in turns       BASELINE_TIMEOUT  seconds, 300
#   BASELINE_ARGS  for benchmarks.run ("--schedules descending order_free")
#   HOST      1, or arguments for benchmarks.run --host                               HOST_TIMEOUT      seconds, 60
#   PROFILE   1, or arguments for benchmarks.profile_one ("--mask causal")            PROFILE_TIMEOUT   seconds, 120
# Results go to $OUT: suite.txt (machine, install, the table printed last), golden_bits.json, tests.txt, sanitizers.txt,
# bench.txt, bench.json, bench.png, before.json, after.json (fingerprints), baseline.json, host.json, profile.txt,
# profile.ncu-rep. The exit status is 0 if every part passed.
set -u -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-$PWD/device_results}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
PYTHON=${PYTHON:-python3}
[ -z "${BASELINE:-}" ] || BASELINE=$(realpath "$BASELINE")
export OUT BASELINE=${BASELINE:-}
if [ -n "${WORK:-}" ]; then
  mkdir -p "$WORK" && work=$(cd "$WORK" && pwd)
else
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi
unset PYTHONPATH
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 DASH_ATTN_REQUIRE_GPU=1
export PIP_NO_INDEX=1 PIP_NO_DEPS=1 PIP_FIND_LINKS=$PWD/.wheels PIP_DISABLE_PIP_VERSION_CHECK=1
if commit=$(git rev-parse HEAD 2>/dev/null); then
  [ -z "$(git status --porcelain -uno)" ] || commit+=-dirty
  export DASH_ATTN_COMMIT=${DASH_ATTN_COMMIT:-$commit}
fi
summary=() status=0

# part NAME SECONDS LOG COMMAND...: runs the command under the limit, and records its output and exit status.
part() {
  local name=$1 limit=$2 log=$OUT/$3 start=$SECONDS rc
  shift 3
  echo "== $name (at most $limit s)"
  timeout -k 10 "$limit" "$@" >>"$log" 2>&1
  rc=$?
  [ $rc -eq 0 ] || status=1
  local how="ok"
  [ $rc -eq 0 ] || how="FAILED, exit status $rc"
  [ $rc -ne 124 ] && [ $rc -ne 137 ] || how="FAILED, out of time after $limit s"
  summary+=("$(printf '%-20s %4d s  %s' "$name" $((SECONDS - start)) "$how")")
  return $rc
}

finish() {
  printf '\n'
  printf '%s\n' "${summary[@]}" | tee -a "$OUT/suite.txt"
  exit $status
}

# make_venv FOLDER: creates a virtual environment with the packages of PYTHON and the wheels of .wheels/.
make_venv() {
  "$PYTHON" -c "import pathlib, sys; sys.path.insert(0, 'build_support'); import prepare
prepare.make_venv(pathlib.Path(sys.argv[1]))" "$1" || return
  if compgen -G ".wheels/*.whl" >/dev/null; then "$1/bin/python" -m pip install -q .wheels/*.whl; fi
}

# install VENV FOLDER: installs the source distribution of this checkout into the environment with pip, and unpacks it
# in FOLDER without the package.
install() {
  "$1/bin/python" -c "import setuptools.build_meta as backend, sys; backend.build_sdist(sys.argv[1])" "$2" || return
  "$1/bin/python" -m pip install -v --no-build-isolation "$2"/dash_attn-*.tar.gz || return
  tar -xf "$2"/dash_attn-*.tar.gz -C "$2" --strip-components=1 && rm -r "$2/dash_attn"
}

# in_place VENV: builds the extensions except the kernels for this machine's Python.
in_place() {
  ls dash_attn/_C*.so || { echo "dash_attn/_C*.so is missing: build it, or carry it to this machine"; return 1; }
  DASH_ATTN_SKIP_CUDA=1 "$1/bin/python" setup.py build_ext --inplace
}

show_package() {
  "$1/bin/python" -c "import dash_attn, pathlib; folder = pathlib.Path(dash_attn.__file__).parent
print('dash_attn', dash_attn.__version__, folder, *sorted(path.name for path in folder.glob('*.so')))"
}

# run_tests PYTHON JOBS TESTS
run_tests() {
  local job gpus pids=() status=0
  IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}"
  run_share() {
    # Each share sees all GPUs, and starts with a different one.
    local share=${3%%/*} first visible
    first=$((${share:-0} % ${#gpus[@]}))
    visible=$(IFS=, && echo "${gpus[*]:first},${gpus[*]:0:first}")
    # shellcheck disable=SC2086
    CUDA_VISIBLE_DEVICES=${visible%,} DASH_ATTN_TEST_SHARE=$3 "$1" -m pytest -v -p no:cacheprovider --tb=short \
      --durations=10 -o faulthandler_timeout=150 $PYTEST_LIMITS $2 >"$OUT/tests_$4.txt" 2>&1
  }
  if [ "$2" -eq 1 ]; then
    run_share "$1" "$3" "" 0
    return
  fi
  for ((job = 0; job < $2; ++job)); do
    run_share "$1" "$3" "$job/$2" "$job" &
    pids+=($!)
  done
  for job in "${pids[@]}"; do wait "$job" || status=1; done
  run_share "$1" "$3" alone alone || status=1
  return $status
}

# run_sanitizers PYTHON TOOLS JOBS: runs the tools concurrently, because each mostly uses one CPU thread.
run_sanitizers() {
  local tool job left_out pids=() status=0
  export OMP_NUM_THREADS=1
  for tool in $2; do
    left_out=
    [ "$tool" != racecheck ] || left_out=--racecheck
    for ((job = 0; job < $3; ++job)); do
      # shellcheck disable=SC2086
      compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 "$1" tests/gpu/sanitizer_case.py \
        --share "$job/$3" $left_out ${SANITIZE_ARGS:-} >"$OUT/${tool}_$job.txt" 2>&1 &
      pids+=($!)
    done
    compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 "$1" tests/gpu/sanitizer_parts.py \
      >"$OUT/${tool}_parts.txt" 2>&1 &
    pids+=($!)
  done
  for job in "${pids[@]}"; do wait "$job" || status=1; done
  return $status
}
export PYTHON
export -f make_venv install in_place show_package run_tests run_sanitizers

{
  nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,memory.total --format=csv,noheader
  "$PYTHON" -c "import sys, torch
print('Python', sys.version.split()[0], 'torch', torch.__version__, 'CUDA', torch.version.cuda)"
} 2>&1 | tee "$OUT/suite.txt"

limit=${INSTALL_TIMEOUT:-180}
sources=$(find csrc dash_attn build_support tests examples setup.py pyproject.toml -type f \
  ! -name '*.so' ! -name '*.pyc' -exec sha256sum {} + | sort | sha256sum)
if [ "$(cat "$work/installed" 2>/dev/null)" = "$sources" ]; then
  cd "$work/source"
else
  rm -rf "$work/source" && mkdir "$work/source"
  part environment 120 suite.txt bash -c 'make_venv "$1"' - "$work/venv" &&
    if [ "${CARRIED:-}" = 1 ]; then
      export PYTHONPATH=$PWD
      part carried "$limit" suite.txt bash -c 'in_place "$1"' - "$work/venv"
    else
      part install "$limit" suite.txt bash -c 'install "$1" "$2"' - "$work/venv" "$work/source" &&
        echo "$sources" >"$work/installed" && cd "$work/source"
    fi
fi &&
  part import 60 suite.txt bash -c 'show_package "$1"' - "$work/venv" ||
  {
    grep -aE 'error|Error|FAILED' "$OUT/suite.txt" | cut -c1-300 | tail -n 20
    tail -n 20 "$OUT/suite.txt" | cut -c1-300
    finish
  }
grep -a '^dash_attn ' "$OUT/suite.txt" | tail -n 1
python=$work/venv/bin/python

if [ -n "${GOLDEN:-}" ]; then
  part golden "${GOLDEN_TIMEOUT:-60}" suite.txt "$python" tests/gpu/golden_bits.py --write
  cp tests/gpu/golden_bits.json "$OUT"
fi

if [ -n "${TESTS:-}" ]; then
  [ "$TESTS" = 1 ] && TESTS=tests/gpu
  # A hanging kernel never returns to Python: the run must end and name the test. With 14 other processes, the CPU
  # reference sometimes takes more than a minute.
  export PYTEST_LIMITS=
  "$python" -c "import pytest_timeout" 2>/dev/null && PYTEST_LIMITS="--timeout=180 --timeout-method=thread"
  part tests "${TESTS_TIMEOUT:-300}" suite.txt bash -c 'run_tests "$@"' - "$python" "${TESTS_JOBS:-1}" "$TESTS"
  cat "$OUT"/tests_*.txt >"$OUT/tests.txt" && rm "$OUT"/tests_*.txt
  grep -aE '^(FAILED|ERROR)|^E   ' "$OUT/tests.txt" | cut -c1-400 | head -n 40
  grep -aE ' s (call|setup) ' "$OUT/tests.txt" | head -n 12
  grep -aE '^=+ .*(passed|failed|error).* in ' "$OUT/tests.txt" | cut -c1-400
  # Also for runs that were stopped, which do not print such a line.
  grep -aoE ' (PASSED|FAILED|ERROR|SKIPPED) ' "$OUT/tests.txt" | sort | uniq -c
  grep -aE '::.* (FAILED|ERROR) ' "$OUT/tests.txt" | cut -c1-200 | sort -u | head -n 40
fi

if [ -n "${SANITIZE:-}" ]; then
  [ "$SANITIZE" = 1 ] && SANITIZE="memcheck racecheck synccheck"
  part sanitizers "${SANITIZE_TIMEOUT:-120}" suite.txt bash -c 'run_sanitizers "$@"' - \
    "$python" "$SANITIZE" "${SANITIZE_JOBS:-1}"
  for log in "$OUT"/*check_*.txt; do echo "== $(basename "$log" .txt)" && cat "$log" && rm "$log"; done \
    >"$OUT/sanitizers.txt"
  shown='(ERROR|RACECHECK) SUMMARY|========= (Error|Warning|Invalid|Barrier|Race)|WRONG| wrong$'
  grep -aE "$shown" "$OUT/sanitizers.txt" | cut -c1-300 | head -n 30
fi

if [ -n "${BENCH:-}" ]; then
  # shellcheck disable=SC2086
  part bench "${BENCH_TIMEOUT:-240}" bench.txt \
    "$python" -m benchmarks.run --grid "$BENCH" --json "$OUT/bench.json" --png "$OUT/bench.png" ${BENCH_ARGS:-}
  grep -aE 'failed:|left out|Error' "$OUT/bench.txt" | cut -c1-300 | sort | uniq -c | head -n 20
  if grep -q 'TFLOP/s (ours' "$OUT/bench.txt"; then
    sed -n '/TFLOP\/s (ours/,$p' "$OUT/bench.txt"
  else
    tail -n 40 "$OUT/bench.txt" | cut -c1-300
  fi
fi

if [ -n "${BASELINE:-}" ]; then
  # shellcheck disable=SC2086
  part baseline "${BASELINE_TIMEOUT:-300}" baseline.txt bash -c '
    "$0" tests/gpu/golden_bits.py --json "$1/before.json" --library "$2" &&
      "$0" tests/gpu/golden_bits.py --json "$1/after.json" &&
      { "$0" tests/gpu/golden_bits.py --compare "$1/before.json" "$1/after.json" || true; }
    shift 2
    "$0" -m benchmarks.run --grid full --pass backward forward --peers --baseline "$BASELINE" \
      --json "$OUT/baseline.json" "$@"
  ' "$python" "$OUT" "$BASELINE" ${BASELINE_ARGS:-}
  tail -n 25 "$OUT/baseline.txt" | cut -c1-300
fi

if [ -n "${HOST:-}" ]; then
  [ "$HOST" = 1 ] && HOST=
  # shellcheck disable=SC2086
  part host "${HOST_TIMEOUT:-60}" bench.txt "$python" -m benchmarks.run --host --json "$OUT/host.json" $HOST
  tail -n 20 "$OUT/bench.txt" | cut -c1-300
fi

if [ -n "${PROFILE:-}" ]; then
  [ "$PROFILE" = 1 ] && PROFILE=
  # shellcheck disable=SC2086
  part profile "${PROFILE_TIMEOUT:-120}" profile.txt \
    ncu --set full --clock-control none --profile-from-start off --force-overwrite -o "$OUT/profile" \
    "$python" -m benchmarks.profile_one $PROFILE
  ncu --import "$OUT/profile.ncu-rep" --page details >>"$OUT/profile.txt" 2>&1
  shown='Duration|SM Frequency|Registers Per|Local (Load|Store)|Executed Ipc Active|Achieved Occ|Tensor'
  grep -aE "^ +[a-z].*\(.*Context|$shown" "$OUT/profile.txt" | cut -c1-160 | head -n 40
fi
finish
