#!/usr/bin/env bash
# Tests of the network with another version of Flower than the pinned one: tools/test_flower.sh [VERSION]
#
# The version is laid over the environment of `make install`, without its requirements: Flower 1.42 asks for
# certifi>=2026.10.19 and uv>=0.13.5, 1.41 for uv<0.13, so that no one set of pins holds both. Neither is used here.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-1.42.0}
base=${BASE:-.venv}
over=.venv/flower-$version
[ -d "$over" ] || "$base/bin/python" -m venv --without-pip "$over"
site=$("$over/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
[ -d "$site/flwr-$version.dist-info" ] || "$base/bin/python" -m pip install --quiet --disable-pip-version-check \
    --no-deps --target "$site" "flwr==$version"
{ "$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; echo "$PWD/src"; } >"$site/base.pth"
"$over/bin/python" -c "import flwr; assert flwr.__version__ == '$version', flwr.__version__"
exec "$over/bin/python" -m pytest -p no:cacheprovider tests/flower/test_flower_versions.py \
    tests/flower/test_flower_limits.py tests/flower/test_flower_link.py tests/flower/test_flower_waiting.py tests/flower/test_flower_bundles.py \
    -k 'not killed_superlink and not hang and not chunk and not key and not authority'
