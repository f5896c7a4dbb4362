"""Real SGLang servers on a GPU, with kvarena and without: start, ask, measure, compare.

    drive.py single NAME --model DIR [--kvarena] [--env NAME=VALUE ...] -- SERVER ARGUMENTS
    drive.py pd NAME --model DIR [--kvarena] [--prefill ARGS] [--decode ARGS] -- SERVER ARGUMENTS OF BOTH
    drive.py compare A B

Each run writes ``NAME.json`` (tokens, KV bytes, kvarena's own status) and ``NAME*.log`` into ``$OUT``. A
comparison fails unless the sequential answers are equal token by token; bursts are compared when both
runs were deterministic, since batches change roundings otherwise. ``PORT`` is where a single server listens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("OUT", "/tmp/kvarena-gpu"))
WAIT_S = float(os.environ.get("WAIT", "300"))
LENGTHS = (5, 40, 127, 300, 900, 1800)
BURST = 12
VOCABULARY = 32000
READY = "The server is fired up"
DEAD = ("Received sigquit from a child", "Scheduler hit an exception")
COMMON = shlex.split(
    "--host 127.0.0.1 --skip-tokenizer-init --attention-backend triton --sampling-backend pytorch "
    "--grammar-backend none --random-seed 1"
)
#: Lines of a log that a reader wants to see.
TELLING = re.compile(
    r"kvarena|Post-capture KV|KV cache (size|allocated)|max_total_num_tokens|UnifiedKVPool (alloc|reserved)|"
    r"mem_fraction_static=|avail mem|Traceback|Error:",
)
FIGURES = ("state", "reserved_bytes", "backed_bytes", "active_bytes", "tokens")


class Server:
    """One server process and its log."""

    def __init__(
        self, name: str, model: str, port: int, arguments: list[str], environment: dict[str, str]
    ) -> None:
        self.name, self.port = name, port
        self.log = OUT / f"{name}.log"
        self.status_dir = OUT / f"{name}.status"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port)]
        # A status directory of one's own tells several servers on one host apart.
        environ = (
            os.environ | {"HF_HUB_OFFLINE": "1", "KVARENA_SOCKET_DIR": str(self.status_dir)} | environment
        )
        if "KVARENA_ENABLE" not in environment:
            environ = {k: v for k, v in environ.items() if not k.startswith("KVARENA_")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *COMMON, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )
        self.began = time.monotonic()
        self.ready_s = 0.0

    def wait(self) -> None:
        """Until it serves; raises with the log's end if it does not."""
        while time.monotonic() - self.began < WAIT_S:
            text = self.log.read_text(errors="replace")
            if READY in text:
                self.ready_s = time.monotonic() - self.began
                say(f"{self.name} ready after {self.ready_s:.1f} s")
                return
            if self.process.poll() is not None or any(line in text for line in DEAD):
                break
            time.sleep(0.3)
        self.show(60)
        raise SystemExit(f"{self.name} did not start:\n{self.log.read_text(errors='replace')[-6000:]}")

    def stop(self) -> None:
        """Its whole process group, so that no scheduler stays on the GPU."""
        for _ in range(100):
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            self.process.poll()
            time.sleep(0.1)

    def post(self, body: dict[str, Any], timeout: float = 180) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def info(self) -> dict[str, Any]:
        for path in ("server_info", "get_server_info"):  # the newer name first
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=30) as answer:
                    told = json.load(answer)
            except OSError:
                continue
            state = (told.get("internal_states") or [{}])[0]
            kept = ("version", "max_total_num_tokens", "mem_fraction_static", "max_running_requests")
            return {name: told.get(name) for name in kept} | {"memory_usage": state.get("memory_usage")}
        return {}

    def status(self) -> list[dict[str, Any]]:
        """What kvarena's status files of this server say: the ledger and the arena."""
        return [json.loads(path.read_text()) for path in sorted(self.status_dir.glob("*.status.json"))]

    def show(self, maximum: int = 40) -> None:
        lines = [
            line[:300] for line in self.log.read_text(errors="replace").splitlines() if TELLING.search(line)
        ]
        lines = [line for line in lines if "server_args=" not in line]
        say(f"--- {self.log.name}: {len(lines)} telling lines")
        say("\n".join(lines[:maximum]))

    def measured(self) -> dict[str, Any]:
        return {"ready_s": self.ready_s, "info": self.info(), "kvarena": self.status(), "gpu": gpu()}


def single(arguments: argparse.Namespace) -> None:
    """One server."""
    port = int(os.environ.get("PORT", "30000"))
    server = Server(arguments.name, arguments.model, port, arguments.rest, environment_of(arguments))
    try:
        server.wait()
        answers = ask(lambda ids, _: server.post(body_of(ids)))
        save(arguments, answers | {"servers": [server.measured()]})
        server.show()
        check_status([server], arguments.kvarena)
    finally:
        server.stop()


def pd(arguments: argparse.Namespace) -> None:
    """A prefill and a decode server on one GPU, KV over Mooncake's TCP."""
    environment = environment_of(arguments) | {"MC_FORCE_TCP": "1"}
    environment["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] = "65535"
    common = ["--disaggregation-transfer-backend", "mooncake", *arguments.rest]
    prefill = ["--disaggregation-bootstrap-port", "8998", *arguments.prefill]
    servers: list[Server] = []
    try:
        for role, port, extra in (("prefill", 30100, prefill), ("decode", 30200, arguments.decode)):
            args = [*common, "--disaggregation-mode", role, *extra]
            servers.append(Server(f"{arguments.name}_{role}", arguments.model, port, args, environment))
            # One after the other: each measures free memory.
            servers[-1].wait()

        def send(ids: list[int], room: int) -> dict[str, Any]:
            body = body_of(ids) | {
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": 8998,
                "bootstrap_room": room,
            }
            answers = in_parallel([partial(server.post, body) for server in servers])
            if isinstance(answers[1], Exception):
                raise SystemExit(f"decode: {answers[1]!r}, prefill: {answers[0]!r}")
            return answers[1]

        answers = ask(send)
        save(arguments, answers | {"servers": [server.measured() for server in servers]})
        for server in servers:
            server.show()
        check_status(servers, arguments.kvarena, registered=True)
    finally:
        for server in servers:
            server.stop()


def compare(arguments: argparse.Namespace) -> None:
    """Tokens of two runs, and their KV bytes side by side."""
    a, b = (json.loads((OUT / f"{name}.json").read_text()) for name in (arguments.name, arguments.other))
    kinds = ["sequential"] + (["burst"] if a["deterministic"] and b["deterministic"] else [])
    for kind in kinds:
        equal = [x["ids"] == y["ids"] for x, y in zip(a[kind], b[kind], strict=True)]
        say(f"{arguments.name} and {arguments.other}: {kind} {sum(equal)} of {len(equal)} equal")
        if not all(equal):
            raise SystemExit(f"{kind}: {[i for i, same in enumerate(equal) if not same]} differ")
    for run in (a, b):
        for server in run["servers"]:
            told = f"gpu {server['gpu']} ready after {server['ready_s']:.1f} s"
            say(f"{run['name']}: {json.dumps(server['info'])} {told}")


def ask(send: Any) -> dict[str, Any]:
    """Six prompts one after the other, then twelve at once; greedy, so that runs can be compared."""
    draw = random.Random(7)
    prompts = [[draw.randrange(10, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    sequential = [kept(send(ids, 1000 + room)) for room, ids in enumerate(prompts)]
    draw = random.Random(11)
    lengths = [draw.randrange(20, 1200) for _ in range(BURST)]
    crowd = [[draw.randrange(10, VOCABULARY) for _ in range(length)] for length in lengths]
    began = time.monotonic()
    answers = in_parallel([partial(send, ids, 2000 + room) for room, ids in enumerate(crowd)])
    failed = [answer for answer in answers if isinstance(answer, Exception)]
    if failed:
        raise SystemExit(f"{len(failed)} of {BURST} requests of the burst failed: {failed[0]!r}")
    distinct = [len(set(answer["ids"])) for answer in sequential]
    say(f"burst of {BURST}: {time.monotonic() - began:.2f} s; distinct tokens {distinct}")
    return {"sequential": sequential, "burst": [kept(answer) for answer in answers]}


def check_status(servers: list[Server], kvarena: bool, *, registered: bool = False) -> None:
    """What the ledger of each server says: nothing but backed bytes, and in PD all of them."""
    for server in servers if kvarena else ():
        pools = [status["pool"] for status in server.status()]
        if not pools:
            raise SystemExit(f"{server.name}: no status file of kvarena in {server.status_dir}")
        for pool in pools:
            engines = pool.get("engines") or []
            held = [engine["registered_bytes"] for engine in engines]
            told = {name: pool[name] for name in FIGURES}
            say(f"{server.name}: {told} handles {len(pool['handle_bytes'])} registered {held}")
            if pool["state"] != "serving" or any(nbytes != pool["backed_bytes"] for nbytes in held):
                raise SystemExit(f"{server.name}: registered is not backed")
            if registered and not held:
                raise SystemExit(f"{server.name}: nothing is registered")


def environment_of(arguments: argparse.Namespace) -> dict[str, str]:
    given = dict(pair.split("=", 1) for pair in arguments.env)
    return given | ({"KVARENA_ENABLE": "1"} if arguments.kvarena else {})


def body_of(ids: list[int]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}


def kept(answer: dict[str, Any]) -> dict[str, Any]:
    told = answer["meta_info"]
    return {"ids": answer["output_ids"], "logprobs": [entry[0] for entry in told["output_token_logprobs"]]}


def in_parallel(calls: list[Any]) -> list[Any]:
    answers: list[Any] = [None] * len(calls)

    def one(index: int) -> None:
        try:
            answers[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - the caller reports it
            answers[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def save(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    told = {"name": arguments.name, "arguments": arguments.rest, "kvarena_enabled": arguments.kvarena}
    told["deterministic"] = "--enable-deterministic-inference" in arguments.rest
    (OUT / f"{arguments.name}.json").write_text(json.dumps(told | found))


def gpu() -> str:
    command = ["nvidia-smi", "--query-gpu=memory.used,memory.free", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description="Real SGLang servers with and without kvarena.")
    parser.add_argument("mode", choices=["single", "pd", "compare"])
    parser.add_argument("name")
    parser.add_argument("other", nargs="?", help="compare: the second run")
    parser.add_argument("--model", default="/tmp/m_gptoss")
    parser.add_argument("--kvarena", action="store_true")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--prefill", type=shlex.split, default=[], help="arguments of the prefill side alone")
    parser.add_argument("--decode", type=shlex.split, default=[], help="arguments of the decode side alone")
    arguments = parser.parse_args(given[:cut])
    arguments.rest = given[cut + 1 :]
    OUT.mkdir(parents=True, exist_ok=True)
    {"single": single, "pd": pd, "compare": compare}[arguments.mode](arguments)


if __name__ == "__main__":
    main()
