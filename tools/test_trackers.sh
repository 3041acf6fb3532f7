#!/usr/bin/env bash
# Tests of MLflow and Trackio against the real libraries: tools/test_trackers.sh
#
# Both ask for other versions of packages than Flower does, so that `make install` has neither: each is laid over its
# environment in a folder of its own. Weights & Biases and TensorBoard are there; `make test` has their tests.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${BASE:-.venv}/bin/python
over=${OVER:-.venv/trackers}
for tracker in mlflow:mlflow-skinny==3.17.2 trackio:trackio==0.43.0; do
    name=${tracker%%:*} package=${tracker#*:}
    if [ ! -d "$over/$name/$name" ]; then # pip's warnings are about Flower, which is not used here
        "$python" -m pip install --quiet --disable-pip-version-check --target "$over/$name" "$package" 2>"$over.log" ||
            { cat "$over.log" >&2 && exit 1; }
    fi
    export PYTHONPATH="src:$over/$name"
    "$python" -c "import $name" # tests are skipped where the library is missing
    "$python" -m pytest -p no:cacheprovider tests/running/test_trackers.py -k "$name"
done
