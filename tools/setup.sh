#!/bin/sh
# Everything that `make demo` and `make test` need on a fresh Debian machine, once. $1: the venv, $2...: extras.
set -eu
venv=$1
extras=$2
cd "$(dirname "$0")/.."

missing=""
# Mooncake's engine links these; its wheel does not carry them.
ldconfig -p | grep -q 'libibverbs\.so\.1 ' || missing="$missing libibverbs1"
ldconfig -p | grep -q 'libnuma\.so\.1 ' || missing="$missing libnuma1"
ldconfig -p | grep -q 'libcurl\.so\.4 ' || missing="$missing libcurl4"
# `kvarena demo --hosts 2` joins two network namespaces.
command -v ip >/dev/null || missing="$missing iproute2"
python3 -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
if [ -n "$missing" ]; then
    echo "setup: installing Debian packages:$missing"
    as_root=""
    [ "$(id -u)" = 0 ] || as_root=sudo
    $as_root apt-get update -qq
    # shellcheck disable=SC2086 # a list of words
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
# torch first and pinned: an open range would take a CUDA build of several GB on a machine without a GPU.
"$venv/bin/pip" install -q -c constraints.txt torch
"$venv/bin/pip" install -q -c constraints.txt -e ".[$extras]"
