"""Contract tests on the real SGLang wheels: fetch what they need, then test each release by itself.

``python tests/sglang/prepare.py`` installs what is missing and runs the tests of every release, one
process each; ``--only 0.5.21`` picks releases, ``--install`` stops after installing, and arguments
after ``--`` go to pytest. Run it with the Python that has kvarena installed.

Everything is kept in ``.cache/contract`` (or the folder that ``KVARENA_CONTRACT_CACHE`` names): a folder
for each wheel, one for each family of transformers, one for the other packages. Each carries a stamp
of what it was made from, so that a second run installs nothing. Wheels come through pip, from its own
cache, the index, or a folder that ``KVARENA_CONTRACT_WHEELS`` names.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
#: Release: the transformers family that it pins.
RELEASES = {
    "0.5.17": "transformers-5.12",
    "0.5.20": "transformers-5.12",
    "0.5.21": "transformers-5.12",
    "0.5.22": "transformers-5.19",
    "0.5.23": "transformers-5.19",
}
#: Tested when they are asked for with ``--only``: what they change over their neighbours is little.
ON_DEMAND = dict.fromkeys(("0.5.18", "0.5.19"), "transformers-5.12")
FAMILIES = RELEASES | ON_DEMAND


def main() -> int:
    """Install, test, and print one line for each release."""
    arguments, rest = _arguments()
    cache = Path(os.environ.get("KVARENA_CONTRACT_CACHE") or ROOT / ".cache" / "contract").resolve()
    releases = arguments.only or list(RELEASES)
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda wanted: _install(cache, *wanted), _wanted(releases)))
    _say(f"prepared {cache} in {time.monotonic() - began:.0f} s")
    if arguments.install:
        return 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda release: _test(cache, release, rest), releases))
    for release, (code, seconds, output) in zip(releases, results, strict=True):
        if code or arguments.verbose:
            _say(output)
        summary = output.strip().splitlines()[-1].strip("= ") if output.strip() else "no output"
        _say(f"{'FAILED' if code else 'passed'}  SGLang {release}  {seconds:.0f} s  {summary}")
    return int(any(code for code, _, _ in results))


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description="Contract tests on the real SGLang wheels.")
    parser.add_argument("--only", action="append", choices=list(FAMILIES), metavar="RELEASE")
    parser.add_argument("--install", action="store_true", help="install what is missing, test nothing")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--verbose", action="store_true", help="show the output of passing releases too")
    return parser.parse_args(given[:cut]), given[cut + 1 :]


def _wanted(releases: list[str]) -> list[tuple[str, list[str], str]]:
    """(folder, pip's arguments, what the stamp is made from), each folder once."""
    wanted = [(f"sglang-{release}", [f"sglang=={release}"], release) for release in releases]
    files = sorted({FAMILIES[release] for release in releases} | {"requirements"})
    for name in files:
        listed = HERE / f"{name}.txt"
        wanted.append((name, ["-r", str(listed)], listed.read_text(encoding="utf-8")))
    return wanted


def _install(cache: Path, name: str, what: list[str], made_from: str) -> None:
    folder = cache / name
    python = f"{sys.implementation.cache_tag} {made_from}"
    stamp = hashlib.sha256(python.encode()).hexdigest()
    kept = folder / ".stamp"
    if kept.exists() and kept.read_text(encoding="utf-8") == stamp:
        return
    shutil.rmtree(folder, ignore_errors=True)
    wheels = os.environ.get("KVARENA_CONTRACT_WHEELS")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-compile", "--target", str(folder), *what]
    command += ["--find-links", wheels] if wheels else []
    _say(f"installing {name}")
    subprocess.run(command, check=True, stderr=subprocess.PIPE)
    kept.write_text(stamp, encoding="utf-8")


def _test(cache: Path, release: str, rest: list[str]) -> tuple[int, float, str]:
    paths = [cache / f"sglang-{release}", cache / FAMILIES[release], cache / "requirements"]
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("KVARENA_", "SGLANG_"))
    }
    # Compiled once into the cache: without that, every run compiles 6000 modules.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    environ["PYTHONPATH"] = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    environ["KVARENA_CONTRACT_RELEASE"] = release
    # One thread each: two releases share two cores.
    environ |= {
        "OMP_NUM_THREADS": "1",
        "MC_FORCE_TCP": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "pytest", str(HERE), "-m", "sglang", "--no-header", "-q", *rest]
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, time.monotonic() - began, done.stdout


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
