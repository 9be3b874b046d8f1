#!/bin/sh
# Print the newest usable Python between two versions: find_python.sh [MIN [MAX]].
#
# A name on PATH proves nothing: it may be a shim for a version that is not
# selected, or a Python packaged without venv. So every candidate is run.
# PYTHON=... is then the only candidate. MAX is the newest version that all
# dependencies have wheels for.
set -eu
min=${1:-3.11}
max=${2:-3.14}

prove='
import sys, sysconfig, venv, ensurepip
low, high = (tuple(map(int, v.split("."))) for v in sys.argv[1:])
if not low <= sys.version_info[:2] <= high or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
# Inside an environment, the interpreter that it was made from.
print("%d.%d.%d" % sys.version_info[:3], getattr(sys, "_base_executable", sys.executable))
'

candidates() {
    if [ -n "${PYTHON:-}" ]; then
        echo "$PYTHON"
        return
    fi
    printf '%s\n' python3.14 python3.13 python3.12 python3.11 python3 python
    for path in "$HOME"/.pyenv/versions/*/bin/python; do
        [ ! -x "$path" ] || echo "$path"
    done
}

# -I: neither the current folder nor PYTHONPATH may decide what is importable.
found=$(candidates | while IFS= read -r candidate; do
    "$candidate" -I -c "$prove" "$min" "$max" 2>/dev/null </dev/null || true
done | sort -t. -k1,1n -k2,2n -k3,3n | tail -n 1)

if [ -z "$found" ]; then
    {
        echo "No usable Python between $min and $max${PYTHON:+ at PYTHON=$PYTHON}."
        echo "It must run and have the modules venv and ensurepip" \
            "(on Debian and Ubuntu: apt install python3-venv)."
        echo "Name one with PYTHON=/path/to/python."
    } >&2
    exit 1
fi
echo "${found#* }"
