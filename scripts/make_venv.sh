#!/usr/bin/env bash
# Make a virtual environment with the first Python that is new enough: make_venv.sh DIR. An existing one is kept.
set -euo pipefail
venv=$1
new_enough='import sys, venv; sys.exit(sys.version_info < (3, 11))'

if "$venv/bin/python" -c "$new_enough" 2>/dev/null; then
    exit 0
fi
for python in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 python}; do
    if "$python" -c "$new_enough" 2>/dev/null; then
        echo "making $venv with $("$python" -c 'import sys; print(sys.executable)')"
        "$python" -m venv --clear "$venv"
        exit 0
    fi
done
echo "no Python of at least 3.11 with the module venv found (tried: ${PYTHON:-python3.11 to python3.14, python3, python});" \
    "install one, or name it: make env PYTHON=/path/to/python3.11" >&2
exit 1
