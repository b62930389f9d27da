#!/usr/bin/env bash
# Tests, sanitizer, benchmark and profile on a Hopper machine in one go, each part under its own time limit.
#
#   TESTS=1 SANITIZE=1 BENCH=full OUT=/tmp/results tools/device_suite.sh
#
# Needs the compiled dash_attn/_C*.so; compiles dash_attn/_schedule for the Python that is here. Parts, off unless set:
#   TESTS     1, or arguments for pytest ("tests/gpu/test_bitwise.py -k margin")      TESTS_TIMEOUT     seconds, 200
#   SANITIZE  1 for "memcheck racecheck synccheck", or some of them                   SANITIZE_TIMEOUT  each, 120
#   SANITIZE_ARGS  for tests/gpu/sanitizer_case.py
#   BENCH     quick, full or bar                                                      BENCH_TIMEOUT     seconds, 240
#   BENCH_ARGS     for benchmarks.run ("--pass backward forward")
#   PROFILE   1, or arguments for benchmarks.profile_one ("--mask causal")            PROFILE_TIMEOUT   seconds, 120
# Results go to $OUT: suite.txt, a log a part, bench.json, bench.png, profile.ncu-rep. The exit status is 0 when every part passed.
set -u -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-$PWD/device_results}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$PWD" DASH_ATTN_REQUIRE_GPU=1
summary=() status=0

# part NAME SECONDS LOG COMMAND...: runs the command under the limit, keeps its output, notes how it ended.
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

# Python's headers, and the pybind11 that comes with torch.
build_schedule() {
  local paths
  paths=$(python3 -c "import sysconfig, torch, pathlib
print(sysconfig.get_config_var('EXT_SUFFIX'), sysconfig.get_path('include'), pathlib.Path(torch.__file__).parent / 'include')") || return
  read -r suffix python_include torch_include <<<"$paths"
  c++ -O2 -shared -fPIC -std=c++17 -fvisibility=hidden -Icsrc -isystem "$python_include" -isystem "$torch_include" \
    csrc/bindings/schedule_module.cpp -o "dash_attn/_schedule$suffix" &&
    python3 -c "import dash_attn.schedule; print(dash_attn.schedule.POLICIES)"
}
export -f build_schedule

{
  nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,memory.total --format=csv,noheader
  python3 -c "import torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda)"
} 2>&1 | tee "$OUT/suite.txt"

part build 120 suite.txt bash -c build_schedule || tail -n 20 "$OUT/suite.txt"
if ! ls dash_attn/_C*.so >/dev/null 2>&1; then
  echo "dash_attn/_C*.so is missing: build it, or carry it to this machine" >&2
  exit 1
fi

if [ -n "${TESTS:-}" ]; then
  [ "$TESTS" = 1 ] && TESTS=tests/gpu
  # A kernel that hangs never returns to Python: end the run there, and say in which test.
  limit=()
  python3 -c "import pytest_timeout" 2>/dev/null && limit=(--timeout=60 --timeout-method=thread)
  # shellcheck disable=SC2086
  part tests "${TESTS_TIMEOUT:-200}" tests.txt \
    python3 -m pytest -v -p no:cacheprovider --tb=short --durations=20 -o faulthandler_timeout=45 "${limit[@]}" $TESTS
  grep -aE '^(FAILED|ERROR)|^E   ' "$OUT/tests.txt" | cut -c1-400 | head -n 40
  grep -aE ' s (call|setup) ' "$OUT/tests.txt" | head -n 12
  tail -n 3 "$OUT/tests.txt" | cut -c1-400
fi

if [ -n "${SANITIZE:-}" ]; then
  [ "$SANITIZE" = 1 ] && SANITIZE="memcheck racecheck synccheck"
  for tool in $SANITIZE; do
    # shellcheck disable=SC2086
    part "$tool" "${SANITIZE_TIMEOUT:-120}" sanitizer.txt \
      compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 python3 tests/gpu/sanitizer_case.py ${SANITIZE_ARGS:-}
  done
  grep -aE 'ERROR SUMMARY|RACECHECK SUMMARY|========= (Error|Warning|Invalid|Barrier|Race)|WRONG| wrong$' "$OUT/sanitizer.txt" |
    cut -c1-300 | head -n 30
fi

if [ -n "${BENCH:-}" ]; then
  # shellcheck disable=SC2086
  part bench "${BENCH_TIMEOUT:-240}" bench.txt \
    python3 -m benchmarks.run --grid "$BENCH" --json "$OUT/bench.json" --png "$OUT/bench.png" ${BENCH_ARGS:-}
  grep -aE 'failed:|left out|Error' "$OUT/bench.txt" | cut -c1-300 | sort | uniq -c | head -n 20
  if grep -q 'TFLOP/s (ours' "$OUT/bench.txt"; then
    sed -n '/TFLOP\/s (ours/,$p' "$OUT/bench.txt"
  else
    tail -n 40 "$OUT/bench.txt" | cut -c1-300
  fi
fi

if [ -n "${PROFILE:-}" ]; then
  [ "$PROFILE" = 1 ] && PROFILE=
  # shellcheck disable=SC2086
  part profile "${PROFILE_TIMEOUT:-120}" profile.txt \
    ncu --set full --clock-control none --profile-from-start off --force-overwrite -o "$OUT/profile" \
    python3 -m benchmarks.profile_one $PROFILE
  ncu --import "$OUT/profile.ncu-rep" --page details >>"$OUT/profile.txt" 2>&1
  grep -aE '^ +[a-z].*\(.*Context|Duration|SM Frequency|Registers Per|Local (Load|Store)|Executed Ipc Active|Achieved Occ|Tensor' \
    "$OUT/profile.txt" | cut -c1-160 | head -n 40
fi

printf '\n'
printf '%s\n' "${summary[@]}" | tee -a "$OUT/suite.txt"
exit $status
