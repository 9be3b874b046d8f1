#!/bin/sh
# Install specjax into a virtual environment: setup_venv.sh VENV STAMP WHAT [PIN...].
#
#   scripts/setup_venv.sh .venv .venv/.dev .[dev] jax==0.10.2
#
# STAMP is written last. An installation that was interrupted leaves .installing
# behind, and the next one starts from nothing: pip may take a package whose files
# were half copied for an installed one.
set -eu
venv=$1 stamp=$2 what=$3
shift 3
say() { echo "==> $*"; }

if pid=$(cat "$venv/.installing" 2>/dev/null) && kill -0 "$pid" 2>/dev/null; then
    say "process $pid is installing into $venv: waiting for it"
    while [ -e "$venv/.installing" ] && kill -0 "$pid" 2>/dev/null; do sleep 1; done
    [ ! "$stamp" -nt pyproject.toml ] || exit 0
fi
if [ -e "$venv/.installing" ]; then
    say "the last installation into $venv was interrupted: starting it anew"
    rm -rf "$venv"
fi

python=
if [ ! -e "$venv/.python" ] || [ -n "${PYTHON:-}" ]; then
    python=$(scripts/find_python.sh)
fi
if [ -n "$python" ] && [ "$python" != "$(cat "$venv/.python" 2>/dev/null)" ]; then
    say "creating $venv with $("$python" -V) ($python)"
    rm -rf "$venv"
    mkdir -p "$venv"
    echo $$ >"$venv/.installing"
    "$python" -m venv "$venv"
    echo "$python" >"$venv/.python"
fi

echo $$ >"$venv/.installing"
say "installing $what${*:+ with $*} into $venv (a minute or two; redone when pyproject.toml changes)"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input \
    -e "$what" "$@" </dev/null
touch "$stamp"
rm "$venv/.installing"
