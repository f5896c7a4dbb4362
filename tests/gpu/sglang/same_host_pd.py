"""Prefill and decode of a real SGLang with KVARENA_SAME_HOST=1 and without: time to the first decoded token.

    same_host_pd.py [--placement one|two] [--lengths 8192,16384,30000] [--repeats 4] -- SERVER ARGUMENTS

Both pairs run kvarena; they differ in that one setting. Each pair gets the same prompts, one after the
other, greedy, so that tokens can be compared; then a burst. The table and ``same_host_pd_*.json`` say what
came when, and who carried how many bytes. It fails if tokens differ, or if pages did not go where they
should. ``one``: both servers on one GPU; ``two``: prefill on GPU 0, decode on GPU 1.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from drive import OUT, VOCABULARY, Server, gpu, in_parallel, say

PREFILL_PORT, DECODE_PORT, BOOTSTRAP_PORT = 30100, 30200, 8998
NEW_TOKENS = 16
BURST, BURST_LENGTH = 6, 8192
STAGGER_S = 8.0
#: Of the six full-attention layers: K and V, 8 heads of 64 bfloat16 each.
BYTES_A_TOKEN = 6 * 2 * 8 * 64 * 2
MOONCAKE = {"MC_FORCE_TCP": "1", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"}


def main() -> int:
    arguments = _arguments()
    OUT.mkdir(parents=True, exist_ok=True)
    lengths = [int(length) for length in arguments.lengths.split(",")]
    runs = {}
    for variant in ("without", "with"):
        runs[variant] = measure(variant, arguments, lengths)
        name = f"same_host_pd_{arguments.placement}.json"
        (OUT / name).write_text(json.dumps({"placement": arguments.placement, **runs}))
    return report(arguments.placement, lengths, runs["without"], runs["with"])


def measure(variant: str, arguments: argparse.Namespace, lengths: list[int]) -> dict[str, Any]:
    """One pair of servers, from their start to their end."""
    # Sockets need a short path, and both sides must look in the same place.
    sockets = Path(tempfile.mkdtemp(prefix="kv-", dir="/tmp"))
    environment = MOONCAKE | {"KVARENA_ENABLE": "1", "KVARENA_SOCKET_DIR": str(sockets)}
    if variant == "with":
        environment["KVARENA_SAME_HOST"] = "1"
    servers: list[Server] = []
    try:
        for role, port, extra in (
            ("prefill", PREFILL_PORT, arguments.prefill),
            ("decode", DECODE_PORT, arguments.decode),
        ):
            args = [*arguments.rest, "--disaggregation-transfer-backend", "mooncake"]
            args += ["--disaggregation-mode", role, *extra]
            if role == "prefill":
                args += ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT)]
            elif arguments.placement == "two":
                args += ["--base-gpu-id", "1"]
            name = f"same_host_pd_{arguments.placement}_{variant}_{role}"
            servers.append(Server(name, arguments.model, port, args, environment))
            if role == "prefill":
                # The second server must not measure free memory while the first one takes it.
                time.sleep(STAGGER_S)
        for server in servers:
            server.wait()
        return ask(servers, sockets, lengths, arguments.repeats)
    finally:
        for server in servers:
            server.stop()
        for server in servers:
            server.show(25)
        shutil.rmtree(sockets, ignore_errors=True)


def ask(servers: list[Server], sockets: Path, lengths: list[int], repeats: int) -> dict[str, Any]:
    """Every prompt is new, so that none is found in a cache; each variant gets the same ones."""
    draw = Random(23)
    rooms = iter(range(1, 1 << 20))
    prompt = lambda length: [draw.randrange(10, VOCABULARY) for _ in range(length)]  # noqa: E731
    warm = [one(servers, prompt(length), next(rooms)) for length in (64, 2048, lengths[0])]
    answers = {
        length: [one(servers, prompt(length), next(rooms)) for _ in range(repeats)] for length in lengths
    }
    crowd = [prompt(BURST_LENGTH) for _ in range(BURST)]
    began = time.monotonic()
    burst = in_parallel([partial(one, servers, ids, next(rooms)) for ids in crowd])
    burst_s = time.monotonic() - began
    failed = [answer for answer in burst if isinstance(answer, BaseException)]
    if failed:
        raise SystemExit(f"{len(failed)} of {BURST} requests of the burst failed: {failed[0]!r}")
    tokens = sum(len(each["prompt"]) for group in (warm, *answers.values(), burst) for each in group)
    for group in (warm, *answers.values(), burst):
        for each in group:
            del each["prompt"]
    carried = bytes_carried(sockets)
    deadline = time.monotonic() + 15
    while carried.get("same-host", BYTES_A_TOKEN * tokens) < BYTES_A_TOKEN * tokens:
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
        carried = bytes_carried(sockets)
    say(f"carried {json.dumps(carried)} for {tokens} tokens of prompts; gpu {gpu()}")
    return {
        "warm": warm,
        "answers": answers,
        "burst": burst,
        "burst_s": burst_s,
        "prompt_tokens": tokens,
        "carried": carried,
        "ready_s": [server.ready_s for server in servers],
    }


def one(servers: list[Server], ids: list[int], room: int) -> dict[str, Any]:
    """One request: seconds to the first token that the client sees, and to the first that decode computed."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {
        "input_ids": ids,
        "sampling_params": sampling,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": BOOTSTRAP_PORT,
        "bootstrap_room": room,
    }
    streamed = json.dumps(body | {"stream": True}).encode()
    plain = json.dumps(body).encode()
    errors: list[Exception] = []

    def prefill() -> None:
        try:
            with urllib.request.urlopen(_request(PREFILL_PORT, plain), timeout=120) as answer:
                answer.read()
        except Exception as error:  # noqa: BLE001 - the decode side reports what follows from it
            errors.append(error)

    thread = threading.Thread(target=prefill)
    began = time.perf_counter()
    thread.start()
    first = decoded = 0.0
    tokens: list[int] = []
    with urllib.request.urlopen(_request(DECODE_PORT, streamed), timeout=120) as answer:
        for line in answer:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now, told = time.perf_counter() - began, json.loads(line[6:])
            if "error" in told:
                raise RuntimeError(f"decode: {told['error']}, prefill: {errors}")
            count = int(told["meta_info"]["completion_tokens"])
            first = first or now
            decoded = decoded or (now if count >= 2 else 0.0)
            # Some releases stream what is new, others all so far.
            new = told["output_ids"]
            tokens = new if len(new) == count else tokens + new
    thread.join()
    if errors or len(tokens) != NEW_TOKENS:
        raise RuntimeError(f"room {room}: {len(tokens)} tokens, prefill {errors}")
    total = time.perf_counter() - began
    return {"prompt": ids, "first_s": first, "decoded_s": decoded, "total_s": total, "ids": tokens}


def bytes_carried(sockets: Path) -> dict[str, int]:
    """Bytes that each engine has moved, by kvarena's status files of both servers (a second late or more)."""
    carried: dict[str, int] = {}
    for path in sorted(sockets.glob("*.status.json")):
        for engine in json.loads(path.read_text())["pool"].get("engines") or ():
            carried[engine["name"]] = carried.get(engine["name"], 0) + engine["transferred_bytes"]
            failed = f"{engine['name']} failures"
            carried[failed] = carried.get(failed, 0) + engine["failures"]
    return carried


def report(placement: str, lengths: list[int], without: dict[str, Any], same: dict[str, Any]) -> int:
    """A short table; the exit code says whether everything is as it must be."""
    say(f"\n{placement} GPU: milliseconds to the first decoded token, median of each (least)")
    say(f"{'prompt':>8} {'Mooncake':>20} {'same host':>20} {'less':>7} {'faster':>7}  tokens")
    good = True
    for length in lengths:
        a, b = without["answers"][length], same["answers"][length]
        old, new = (statistics.median(x["decoded_s"] for x in side) * 1e3 for side in (a, b))
        minimum = [min(x["decoded_s"] for x in side) * 1e3 for side in (a, b)]
        equal = sum(x["ids"] == y["ids"] for x, y in zip(a, b, strict=True))
        good &= equal == len(a)
        say(
            f"{length:>8} {old:>11.1f} ({minimum[0]:.1f}) {new:>11.1f} ({minimum[1]:.1f}) "
            f"{old - new:>7.1f} {old / new:>6.2f}x  {equal} of {len(a)} equal"
        )
    means = [statistics.mean(x["decoded_s"] for x in side["burst"]) * 1e3 for side in (without, same)]
    say(
        f"burst of {BURST} x {BURST_LENGTH}: mean {means[0]:.1f} against {means[1]:.1f} ms, "
        f"all done in {without['burst_s']:.2f} against {same['burst_s']:.2f} s"
    )
    mapped, by_mooncake = (same["carried"].get(name, 0) for name in ("same-host", "mooncake"))
    before = without["carried"].get("mooncake", 0)
    say(f"carried with it: {mapped} bytes mapped, {by_mooncake} by Mooncake; same-host failures "
        f"{same['carried'].get('same-host failures')}")  # fmt: skip
    # Without the setting nothing is counted: SGLang's own calls are then not in our way.
    say(f"carried without it, counted: {before}; ready after {without['ready_s']} and {same['ready_s']} s")
    if mapped < same["prompt_tokens"] * BYTES_A_TOKEN or by_mooncake > mapped // 100:
        say("FAILED: pages did not go through mapped memory")
        good = False
    if same["carried"].get("same-host failures"):
        say("FAILED: the same-host path fell back")
        good = False
    say("passed" if good else "FAILED")
    return 0 if good else 1


def _request(port: int, body: bytes) -> urllib.request.Request:
    return urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"}
    )


def _arguments() -> argparse.Namespace:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description="PD of a real SGLang, with the same-host path and without.")
    parser.add_argument("--placement", choices=["one", "two"], default="one")
    parser.add_argument("--lengths", default="8192,16384,30000")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--model", default="/tmp/m_gptoss")
    parser.add_argument("--prefill", type=shlex.split, default=shlex.split("--mem-fraction-static 0.3"))
    parser.add_argument("--decode", type=shlex.split, default=shlex.split("--mem-fraction-static 0.6"))
    arguments = parser.parse_args(given[:cut])
    arguments.rest = given[cut + 1 :]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
