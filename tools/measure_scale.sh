#!/usr/bin/env bash
# What docs/cluster.md and docs/scale.md need of an idle machine, as rows of Markdown; a quarter of an hour at most.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
timeout 240 "$python" -m benchmarks cluster >/dev/null || echo "the benchmark of the cluster did not end" >&2
cat .bench/cluster.md
echo
timeout 900 "$python" tools/scale.py loopback --sites 50 200 500
