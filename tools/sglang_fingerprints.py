"""Record what the code of SGLang's releases is, for `kvarena.plugin.engines.sglang.families`.

``python tools/sglang_fingerprints.py [--check] RELEASE=WHERE ...``, where WHERE is a wheel (from
``pip download --no-deps sglang==0.5.24``) or the folder that it is installed in, such as
``.cache/contract/sglang-0.5.23``. Only the named releases are written anew; ``--check`` writes nothing
and fails where something differs. See "A new release" in ``docs/engines/sglang.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvarena.plugin.engines.sglang.families import FAMILIES
from kvarena.plugin.engines.sglang.families.fingerprints import RECORDED, Fingerprint, fingerprint_of
from kvarena.plugin.engines.sglang.families.source import SglangSource


def record(release: str, where: Path) -> dict[str, Any]:
    """What is recorded of a release.

    Parameters
    ----------
    release : str
        A release that one of `FAMILIES` names as tested.
    where : Path
        Its wheel, or a folder that holds the package ``sglang``.
    """
    families = [family for family in FAMILIES if release in family.releases]
    if not families:
        sys.exit(f"No family names {release} among its releases; add it there first (families/v*.py).")
    source = SglangSource(where) if where.is_dir() else SglangSource.wheel(where)
    return as_json(fingerprint_of(families[0], source))


def as_json(fingerprint: Fingerprint) -> dict[str, Any]:
    """A fingerprint as it is stored: attributes as one text, so that a diff shows what is new."""
    return {
        "attributes": {path: " ".join(sorted(names)) for path, names in fingerprint.attributes.items()},
        "bodies": dict(fingerprint.bodies),
    }


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description="Record what the code of SGLang's releases is.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where something differs")
    parser.add_argument("releases", nargs="+", metavar="RELEASE=WHERE")
    given = parser.parse_args()
    kept = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    found = kept | {
        release: record(release, Path(where))
        for release, _, where in (each.partition("=") for each in given.releases)
    }
    if given.check:
        changed = [release for release in found if found[release] != kept.get(release)]
        sys.stdout.write("".join(f"SGLang {release} differs from what is recorded.\n" for release in changed))
        return int(bool(changed))
    ordered = dict(sorted(found.items(), key=lambda each: [int(part) for part in each[0].split(".")[:3]]))
    RECORDED.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
