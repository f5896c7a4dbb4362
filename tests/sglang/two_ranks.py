"""A server of two ranks: SGLang's world group, over which first one rank builds a pool, and then both.

Run as a program with a release and a folder; where the store is comes from the environment, as from torchrun.
Each rank leaves what came of its pools in a file. The second rank is forked: to import SGLang takes long.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    import pytest

    warnings.simplefilter("ignore")
    with pytest.MonkeyPatch.context() as patch:
        # A program finds its neighbours by their names.
        import mocks

        mocks.install()
        from kvarena.plugin.engines.sglang import ranks
        from rig import Release, Rig
        from sglang.srt.distributed.parallel_state import init_distributed_environment

        rig = Rig(Release(sys.argv[1]), patch)  # publishes a configuration, which forgets groups
        missed, alone = os.pipe()
        second = os.fork()
        rank = int(second == 0)
        init_distributed_environment(2, rank, "env://", rank, "gloo")
        answers = []
        if rank == 1:
            ranks.ROLL_CALL_TIMEOUT = datetime.timedelta(seconds=3)
            answers.append(build(rig))
            os.write(alone, b"!")
        else:
            os.close(alone)
            os.read(missed, 1)
        ranks.ROLL_CALL_TIMEOUT = datetime.timedelta(seconds=60)
        answers.append(build(rig))
        rig.close()
        (Path(sys.argv[2]) / f"{rank}.json").write_text(json.dumps(answers))
    if rank == 0:
        os.waitpid(second, 0)


def build(rig: Any) -> dict[str, Any]:
    """What came of a pool."""
    from kvarena.errors import KvArenaError

    try:
        return {"error": "", "backed": rig.reserved(256, 128).bound.arena.backed_bytes}
    except KvArenaError as error:
        return {"error": str(error), "backed": 0}


if __name__ == "__main__":
    main()
