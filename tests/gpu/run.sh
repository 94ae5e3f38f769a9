#!/usr/bin/env bash
# run.sh: the GPU script: what needs an NVIDIA card, with lily installed. Builds nothing.
#
#   tests/gpu/run.sh [pytest arguments]      PYTHON=python3.12 tests/gpu/run.sh -x
#
# 1. every test with a "cuda" case, in memory poisoned with NaN; 2. the kernel tests again under
# compute-sanitizer where there is one. Exits with the number of parts that failed.
set -u
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
failed=0

part() {
  echo "== $*"
  "$@" || failed=$((failed + 1))
}

"$python" - <<'END' || exit 1
import sys
import lily
status = next(s for s in lily.devices() if s.name == "cuda")
print(status.description)
sys.exit(not status.available)
END

export LILY_REQUIRE=cuda LILY_POISON=1
part "$python" -m pytest -q -k cuda "$@"

# The kernels of one op each; test_cuda.py starts processes under a fake driver, no work for this.
if command -v compute-sanitizer > /dev/null; then
  for tool in memcheck racecheck synccheck; do
    part compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$python" -m pytest -q -k "cuda and ${LILY_SANITIZE:-(linear or moe or embed or attention or delta or sample)}" \
      --ignore tests/test_cuda.py "$@"
  done
else
  echo "== compute-sanitizer is not installed: skipped"
fi
echo "== parts that failed: $failed"
exit "$failed"
