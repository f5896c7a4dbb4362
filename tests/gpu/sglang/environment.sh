# What every script here sets before it starts servers; $N names the release's site (sourced, not run).
# JIT: where compiled kernels are kept; two releases at once, each on its own card, want one each.
JIT=${JIT:-/tmp/jit}
export TVM_FFI_CACHE_DIR=$JIT/tvm TRITON_CACHE_DIR=$JIT/triton FLASHINFER_WORKSPACE_BASE=$JIT/fi
export PYTHONUNBUFFERED=1 OUT=${OUT:-/tmp/out}
. /tmp/env_$N.sh
export PYTHONPATH=/tmp/under_test:$PYTHONPATH
