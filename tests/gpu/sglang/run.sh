#!/bin/bash
# On the GPU host, in the repository's root, after the site of a release was unpacked to /tmp/site_NAME and
# kvarena's wheel (with pluggy) was installed into /tmp/under_test:
#   bash tests/gpu/sglang/run.sh NAME STEP...
# NAME: c (SGLang 0.5.21), d (0.5.23) or a (0.5.17).  Steps:
#   stock      unified memory, stock            post    stock's own post-capture sizing (c, a: without unified memory)
#   kvarena    unified memory with kvarena      det     the two again, deterministic, with the burst compared
#   pd         prefill and decode with kvarena  pdstock the same pair as stock
# A run is compared with "stock" of the same call where there is one. FEW=1: few graph sizes. XARGS: more arguments.
set -e
N=$1; shift
. tests/gpu/sglang/environment.sh
D="python3 tests/gpu/sglang/drive.py"
SIZES="--cuda-graph-max-bs-decode 32"
[ -n "$FEW" ] && SIZES="--cuda-graph-bs-decode 1 2 4 8 16 32 --cuda-graph-bs-prefill 16 64 256 1024 2048"
ARGS="$SIZES --chunked-prefill-size 2048 --max-running-requests 32 $XARGS"
UNI="$ARGS --enable-unified-memory"
K="--kvarena"; [ "$N" = a ] && K="--kvarena --env KVARENA_SGLANG_EXPERIMENTAL=1"
POST="--env SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1"
DET="$UNI --enable-deterministic-inference"
P="--mem-fraction-static ${P_FRACTION:-0.3}"; Q="--mem-fraction-static ${D_FRACTION:-0.5}"
against() { if [ -e "$OUT/$1.json" ]; then $D compare "$1" "$2"; fi; }
for s in "$@"; do echo "== $N $s $(date +%T)"; case $s in
stock)   $D single ${N}_stock -- $UNI;;
post)    if [ "$N" = d ]; then $D single ${N}_post $POST -- $UNI; against ${N}_stock ${N}_post; else $D single ${N}_post $POST -- $ARGS; fi;;
kvarena) $D single ${N}_kvarena $K -- $UNI; against ${N}_stock ${N}_kvarena;;
det)     $D single ${N}_dstock -- $DET; $D single ${N}_dkvarena $K -- $DET; $D compare ${N}_dstock ${N}_dkvarena;;
pdstock) $D pd ${N}_pdstock --prefill "$P" --decode "$Q" -- $UNI; against ${N}_stock ${N}_pdstock;;
pd)      $D pd ${N}_pd $K --prefill "$P" --decode "$Q" -- $UNI; against ${N}_stock ${N}_pd; against ${N}_kvarena ${N}_pd;;
*) echo "no step $s"; exit 2;;
esac; done
date +%T
