#!/bin/bash
# On a host with two GPUs, after run.sh's preparations: bash tests/gpu/sglang/two_gpus.sh NAME STEP...
#   stock   tensor parallel over both cards, stock unified memory
#   tp      the same with kvarena, while a process holds HOG GiB (default 20) of the second card
#   fail    the same without the hog, the second rank's first backing fails
#   refuse  the second rank's backing fails as often as it is tried
#   pd      prefill on the first card, decode on the second, Mooncake over TCP, with kvarena
set -e
N=$1; shift
. tests/gpu/sglang/environment.sh
D="python3 tests/gpu/sglang/drive.py"
ARGS="--cuda-graph-bs-decode 1 2 4 8 16 32 --cuda-graph-bs-prefill 16 64 256 1024 2048"
ARGS="$ARGS --chunked-prefill-size 2048 --max-running-requests 32 --enable-unified-memory $XARGS"
# Without flashinfer's fused all-reduce, whose kernels take minutes to compile on a fresh host.
TP="$ARGS --tp-size 2 --disable-custom-all-reduce --enforce-disable-flashinfer-allreduce-fusion"
# SGLang itself refuses cards whose free memory differs by a tenth; that is what the hog makes.
export SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0
told() { grep -hE "kvarena[:.]|Post-capture KV sizing|max_total_num_tokens=" "$OUT/$1.log" | cut -c1-330 | tail -${2:-14}; }
for s in "$@"; do echo "== $N $s $(date +%T)"; case $s in
stock) $D single ${N}_tpstock -- $TP;;
tp)    python3 -c "import torch,time; x=torch.empty(${HOG:-20}<<30,dtype=torch.uint8,device='cuda:1'); torch.cuda.synchronize(); print('hog holds',x.numel(),flush=True); time.sleep(600)" & HOGPID=$!
       sleep 6; $D single ${N}_tp --kvarena -- $TP || true; told ${N}_tp; kill $HOGPID; [ ! -e $OUT/${N}_tpstock.json ] || $D compare ${N}_tpstock ${N}_tp;;
fail)  FAILING_DEVICE=1 PYTHONPATH=/tmp/failing:$PYTHONPATH $D single ${N}_tpfail --kvarena -- $TP || true; told ${N}_tpfail; [ ! -e $OUT/${N}_tpstock.json ] || $D compare ${N}_tpstock ${N}_tpfail;;
refuse) FAILING_DEVICE=1 FAILING_FOREVER=1 PYTHONPATH=/tmp/failing:$PYTHONPATH $D single ${N}_tprefuse --kvarena -- $TP || true; told ${N}_tprefuse 24;;
pd)    $D pd ${N}_pd2 --kvarena --prefill "--base-gpu-id 0" --decode "--base-gpu-id 1" -- $ARGS; told ${N}_pd2_prefill 6; told ${N}_pd2_decode 6;;
*) echo "no step $s"; exit 2;;
esac; done
date +%T
