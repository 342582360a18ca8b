#!/usr/bin/env bash
# Serve the tiny checkpoint with stock SGLang and the plugin, on the GPU if there is one. Further SGLang flags
# may follow; PORT (30000) and TINY (.cache/tiny) can be set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tiny=${TINY:-.cache/tiny}
# A checkpoint that the caller names is taken as it is.
if [ -z "${TINY:-}" ] || [ ! -f "$tiny/config.json" ]; then
    .venv/bin/python -m sglang_m3.tiny "$tiny"
fi
# The tiny model's matrices are too small to share among threads; an idle scheduler would keep a core busy.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m sglang.launch_server \
    --model-path "$tiny" \
    --trust-remote-code \
    --enable-multimodal \
    --chunked-prefill-size 1024 \
    --reasoning-parser minimax-m3 \
    --tool-call-parser minimax-m3 \
    --max-total-tokens 65536 \
    --enable-metrics \
    --enable-cache-report \
    --sleep-on-idle \
    --port "${PORT:-30000}" \
    "$@"
