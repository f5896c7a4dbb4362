# What every script here sets before it starts servers; $N names the release's site (sourced, not run).
export TVM_FFI_CACHE_DIR=/tmp/jit/tvm TRITON_CACHE_DIR=/tmp/jit/triton FLASHINFER_WORKSPACE_BASE=/tmp/jit/fi
export PYTHONUNBUFFERED=1 OUT=${OUT:-/tmp/out}
. /tmp/env_$N.sh
export PYTHONPATH=/tmp/under_test:$PYTHONPATH
