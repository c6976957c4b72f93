#!/bin/sh
# Runs things by name on a machine with a GPU: scripts/gpu.sh NAME [arguments]
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
name=${1:?"name one of: tests, bench_core, sanitize"}
shift
case $name in
  tests) exec python3 -m pytest -m gpu tests/gpu "$@" ;;
  bench_core) exec python3 scripts/bench_core.py "$@" ;;
  sanitize)
    for tool in memcheck initcheck racecheck; do
      # Probes for newer driver calls are reported as API errors. racecheck does not see that st.async orders what it signals.
      compute-sanitizer --tool "$tool" --report-api-errors no --print-limit 20 --error-exitcode 1 python3 -m pytest -q -m gpu tests/gpu "$@"
    done ;;
  *) echo "gpu.sh: no $name; tests, bench_core or sanitize" >&2; exit 2 ;;
esac
