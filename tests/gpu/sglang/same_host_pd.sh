#!/bin/bash
# On the GPU host, in the repository's root, prepared as run.sh wants it (site in /tmp/site_NAME, wheel in /tmp/under_test):
#   bash tests/gpu/sglang/same_host_pd.sh NAME [OPTIONS OF same_host_pd.py]
# NAME: c (SGLang 0.5.21) or d (0.5.23). XARGS: more arguments for all servers, e.g. "--moe-runner-backend triton".
set -e
N=$1; shift
. tests/gpu/sglang/environment.sh
date +%T
python3 tests/gpu/sglang/same_host_pd.py "$@" -- --enable-unified-memory --cuda-graph-bs-decode 1 2 4 8 16 \
  --cuda-graph-bs-prefill 16 64 256 1024 2048 --chunked-prefill-size 2048 --max-running-requests 16 $XARGS
date +%T
