#!/bin/bash
# On a GPU host, in the repository's root: everything that needs no SGLang, each step with a log in $OUT.
#   bash tests/gpu/run.sh STEP...
# Steps, with what they took on an H200 where that is known:
#   site     wheels of $WHEELS (.whl; msgspec, pyzmq, rich, Mooncake cuda13, NIXL cu13) into /tmp/site; the last two
#            are too large for one transfer, so it can be called again with another folder
#   bench    bench/same_host.py (25 s; on two cards 50)
#   floors   bench/arena.py (10 s) and bench/transfer.py --memory cuda (30 s)
#   tests    all of tests/gpu but SGLang (135 s)
#   demo     the pair on one card, by Mooncake and same-host, and the doctor (55 s)
#   cards    the pair on two cards: tests/gpu/embedded/test_two_cards.py (75 s)
# A step that fails does not stop the next; the exit status says whether any did.
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"
export PYTHONPATH=/tmp/site:.types PYTHONUNBUFFERED=1 MC_LOG_LEVEL=ERROR
PYTHON=${PYTHON:-python3}
PYTEST="$PYTHON -m pytest -q"
# Where kvarena is not installed, nothing tells pytest of its fixtures.
$PYTHON -c "import importlib.metadata as m; m.distribution('kvarena')" 2>/dev/null || PYTEST="$PYTEST -p kvarena.transfer.testing.pytest_plugin"
KVARENA="$PYTHON -m kvarena.plugin.commands.cli"
failed=0
step() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2; shift 2
    echo "== $name $(date +%T)"
    timeout -k 5 "$limit" "$@" >"$OUT/$name.log" 2>&1 || { echo "   failed with $?"; failed=1; }
    tail -n "${TAIL:-4}" "$OUT/$name.log" | cut -c1-300
}
for s in "$@"; do case $s in
site)   step site 60 $PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site "${WHEELS:-.whl}"/*.whl;;
bench)  TAIL=60 step same_host 120 $PYTHON bench/same_host.py;;
floors) TAIL=12 step arena 60 $PYTHON bench/arena.py --device cuda
        TAIL=24 step transfer 150 $PYTHON bench/transfer.py --memory cuda --rounds 3;;
tests)  step tests 400 $PYTEST tests/gpu --ignore tests/gpu/sglang;;
demo)   TAIL=2 step demo_mooncake 60 $KVARENA demo --device cuda
        TAIL=2 step demo_same_host 60 $KVARENA demo --device cuda --transfer same-host --grow 2
        TAIL=30 step doctor 90 $KVARENA doctor --device cuda --engine embedded;;
cards)  step cards 300 $PYTEST tests/gpu/embedded/test_two_cards.py;;
*)      echo "no step $s"; exit 2;;
esac; done
date +%T
exit $failed
