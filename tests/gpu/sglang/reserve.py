"""The measured reserve on a GPU, beside unmodified SGLang: KV, tokens, and what stays free under a crowd.

    reserve.py NAME [--model DIR] [--vocabulary N] [--limits none 32] [--requests 4096] [--seconds 520]
               [-- SERVER ARGUMENTS]

For each limit of running requests, a server with kvarena and an unmodified one; each is asked with as many
short requests at once, with top-p. Writes ``NAME_reserve.json`` into ``$OUT`` and prints a table. What does
not fit into ``--seconds`` is left out, and named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import drive

#: Seconds that a server may take to start, and a crowd to be answered.
START_S, CROWD_S = 170.0, 100.0
PROMPT, ANSWER, AT_ONCE = 16, 32, 256


class LeastFree:
    """The least free memory of the first GPU, looked at five times a second by nvidia-smi."""

    def __init__(self) -> None:
        self.mib: list[int] = []
        query = ["nvidia-smi", "-i", "0", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
        self._process = subprocess.Popen([*query, "-lms", "200"], stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                self.mib.append(int(line))

    def since(self, index: int) -> float | None:
        """GiB."""
        seen = self.mib[index:]
        return round(min(seen) / 1024, 2) if seen else None

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)


@contextlib.contextmanager
def watching() -> Iterator[LeastFree]:
    """For as long as a server runs."""
    free = LeastFree()
    try:
        yield free
    finally:
        free.close()


def crowd(server: drive.Server, count: int, vocabulary: int, sampling: dict[str, Any]) -> dict[str, Any]:
    """As many requests at once, in posts of `AT_ONCE` prompts each."""
    draw = random.Random(5)
    prompts = [[draw.randrange(10, vocabulary) for _ in range(PROMPT)] for _ in range(count)]
    parts = [prompts[start : start + AT_ONCE] for start in range(0, count, AT_ONCE)]
    body = {"sampling_params": sampling | {"max_new_tokens": ANSWER, "ignore_eos": True}}
    began = time.monotonic()
    calls = [partial(server.post, body | {"input_ids": part}, CROWD_S) for part in parts]
    answers = drive.in_parallel(calls)
    failed = [repr(answer)[:200] for answer in answers if isinstance(answer, Exception)]
    answered = sum(len(answer) for answer in answers if not isinstance(answer, Exception))
    return {"answered": answered, "errors": failed[:3], "seconds": round(time.monotonic() - began, 1)}


def one(name: str, kvarena: bool, limit: str, given: argparse.Namespace) -> dict[str, Any]:
    """One server, from its start to its end."""
    arguments = ["--enable-unified-memory", *given.rest]
    arguments += [] if limit == "none" else ["--max-running-requests", limit]
    environment = {"KVARENA_ENABLE": "1"} if kvarena else {}
    found: dict[str, Any] = {"name": name, "kvarena": kvarena, "limit": limit}
    with watching() as free:
        server = drive.Server(name, str(given.model), 30000, arguments, environment)
        try:
            server.wait()
            time.sleep(1)
            text = server.log.read_text(errors="replace")
            found |= server.info() | {"ready_s": round(server.ready_s, 1), "free_gib": free.since(-2)}
            found["reserve"] = [line for line in text.splitlines() if "kvarena: reserve" in line][-2:]
            seen = len(free.mib)
            sampling = {"temperature": 1.0, "top_p": 0.9}
            found["crowd"] = crowd(server, given.requests, given.vocabulary, sampling)
            found["least_free_gib"] = free.since(seen)
            found["alive"] = server.process.poll() is None and not any(
                line in server.log.read_text(errors="replace") for line in drive.DEAD
            )
            if found["alive"]:
                found["again"] = crowd(server, 8, given.vocabulary, {"temperature": 0})["answered"]
        except (SystemExit, OSError) as error:
            found["failed"] = str(error)[:600]
        finally:
            server.stop()
    return found


def model_of(given: argparse.Namespace) -> Path:
    """The model's configuration with another vocabulary; its weights are dummies."""
    target = Path(f"/tmp/m_reserve_{given.vocabulary}")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    config = json.loads((Path(given.model) / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": given.vocabulary}))
    return target


def table(rows: list[dict[str, Any]]) -> None:
    """What a reader compares."""
    drive.say(
        f"{'server':28} {'KV GiB':>8} {'tokens':>9} {'requests':>8} {'free':>6} {'least':>6} {'ready':>6}"
    )
    for row in rows:
        usage = row.get("memory_usage") or {}
        told = (
            f"{row['name']:28} {usage.get('kvcache', '-')!s:>8} {row.get('max_total_num_tokens', '-')!s:>9} "
            f"{row.get('max_running_requests', '-')!s:>8} {row.get('free_gib', '-')!s:>6} "
            f"{row.get('least_free_gib', '-')!s:>6} {row.get('ready_s', '-')!s:>6}"
        )
        drive.say(f"{told}  {row.get('crowd') or row.get('failed')} alive={row.get('alive')}")
    by_limit: dict[str, dict[bool, Any]] = {}
    for row in rows:
        by_limit.setdefault(row["limit"], {})[row["kvarena"]] = row.get("max_total_num_tokens")
    for limit, pair in by_limit.items():
        ours, stock = pair.get(True), pair.get(False)
        if ours and stock:
            drive.say(f"limit {limit}: {ours - stock:+d} tokens" + ("" if ours >= stock else "  FEWER"))


def main() -> None:
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description="The measured reserve beside unmodified SGLang.")
    parser.add_argument("name")
    parser.add_argument("--model", default="/tmp/m_gptoss")
    parser.add_argument("--vocabulary", type=int, default=201088)
    parser.add_argument("--limits", nargs="+", default=["none", "32"])
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=520)
    given = parser.parse_args(arguments[:cut])
    given.rest = ["--load-format", "dummy", *arguments[cut + 1 :]]
    given.model = model_of(given)
    drive.WAIT_S = START_S
    drive.OUT.mkdir(parents=True, exist_ok=True)
    began, rows = time.monotonic(), []
    last = 60.0
    for limit in given.limits:
        for kvarena in (True, False):
            name = f"{given.name}_{'kvarena' if kvarena else 'stock'}_{limit}"
            left = given.seconds - (time.monotonic() - began)
            if left < last + 20:
                drive.say(f"{name}: left out, {left:.0f} s are left and the last server took {last:.0f} s")
                continue
            at = time.monotonic()
            drive.WAIT_S = min(START_S, left - 20)
            rows.append(one(name, kvarena, limit, given))
            last = time.monotonic() - at
            (drive.OUT / f"{given.name}_reserve.json").write_text(json.dumps(rows, indent=1))
            drive.say(json.dumps(rows[-1]))
    table(rows)


if __name__ == "__main__":
    main()
