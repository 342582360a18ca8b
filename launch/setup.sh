#!/usr/bin/env bash
# Make .venv with the pinned packages and this checkout. Does nothing when it is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Everything that decides what is installed: packages, the project's own metadata, and where the checkout lies.
stamp=.venv/.installed
wanted=$(cat requirements.txt pyproject.toml; pwd)
if [ -f "$stamp" ] && [ "$wanted" = "$(cat "$stamp")" ]; then
    exit 0
fi

uv=$(command -v uv || true)
if [ -z "$uv" ]; then
    echo "== installing uv into .uv"
    python3 -m venv .uv
    .uv/bin/python -m pip install --quiet uv
    uv=.uv/bin/uv
fi

[ -x .venv/bin/python ] || "$uv" venv --python 3.11 .venv
echo "== installing $(grep -c == requirements.txt) packages into .venv, SGLang among them"
# Compiled once here: SGLang imports thousands of modules in each of its processes.
"$uv" pip install --python .venv/bin/python --compile-bytecode -r requirements.txt
"$uv" pip install --python .venv/bin/python --no-deps -e .
printf "%s\n" "$wanted" > "$stamp"
