#!/bin/bash
# On the GPU host, in the repository's root, prepared as run.sh wants it (site in /tmp/site_NAME, wheel in
# /tmp/under_test, a model's config.json in $MODEL; its weights are not needed):
#   [MODEL=DIR] [XARGS="..."] bash tests/gpu/sglang/reserve.sh NAME [OPTIONS OF reserve.py]
# NAME: c (SGLang 0.5.21) or d (0.5.23). Ends by itself within --seconds (520) and half a minute, so that one call of
# nine minutes is enough. XARGS: more arguments for all servers, e.g. "--sampling-backend flashinfer".
N=$1; shift
. tests/gpu/sglang/environment.sh
date +%T
timeout -k 10 550 python3 tests/gpu/sglang/reserve.py "$N" --model "${MODEL:-/tmp/m_gptoss}" "$@" -- $XARGS
code=$?
grep -hE "kvarena: (reserve|the pool gets|finalized)|Post-capture KV sizing" $OUT/${N}_kvarena_*.log | cut -c1-400
date +%T
exit $code
