#!/usr/bin/env bash
# Build the wheel of the tree and that of the sdist, which must hold the same files, and use it in an empty environment
# outside the checkout.
# `--calib` also installs that extra and calibrates the embedded model. Needs `make env`; pip's own variables are honoured.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
export KVQ_HOME=$place/home HF_HUB_OFFLINE=1

.venv/bin/python -m build --no-isolation --wheel --outdir "$place/tree" . >"$place/log" || { cat "$place/log"; exit 1; }
.venv/bin/python -m build --no-isolation --outdir "$place/sdist" . >"$place/log" || { cat "$place/log"; exit 1; }

.venv/bin/python - "$place"/tree/*.whl "$place"/sdist/*.whl <<'END'
import sys
import zipfile

tree, sdist = ({file.filename: file.CRC for file in zipfile.ZipFile(path).infolist()} for path in sys.argv[1:])
differing = sorted(name for name in {*tree, *sdist} if tree.get(name) != sdist.get(name))
sys.exit(f"the wheels of tree and sdist differ in {', '.join(differing)}" if differing else 0)
END
wheel=$(echo "$place"/sdist/*.whl)
bin=$place/env/bin
.venv/bin/python -m venv "$place/env"
cd "$place"
"$bin/pip" install --quiet --disable-pip-version-check -c "$root/constraints.txt" "$wheel"
"$bin/kvq" list
# the command, file by file, in one process: torch is imported once
"$bin/python" -c "
import sys
from kvq_runtime.cli.main import main
sys.exit(max(main(['verify', file]) for file in sys.argv[1:]))" "$root"/artifacts/golden/*/*.safetensors
code=0
"$bin/kvq-calibrate" --model demo >calibrate.log 2>&1 || code=$?
if [ "$code" -eq 0 ] || ! grep -q '\[calib\]' calibrate.log; then
    echo "kvq-calibrate without its extra should fail and name it; exit code $code:" >&2
    cat calibrate.log >&2
    exit 1
fi
echo "the wheel, the same of tree and sdist, works in an empty environment"

if [ "${1:-}" = --calib ]; then
    "$bin/pip" install --quiet --disable-pip-version-check -c "$root/constraints.txt" "$wheel[calib]"
    "$bin/kvq-calibrate" --model demo --recipe aqua-2bit --samples 8 --seq-len 256
    "$bin/kvq" list
    echo "and calibrates with its extra"
fi
