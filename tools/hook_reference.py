"""Write ``docs/hooks.md`` from the hook specifications: ``python tools/hook_reference.py [--check]``."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from kvarena.hooks import specs

PAGE = Path(__file__).parents[1] / "docs" / "hooks.md"

HEAD = """# Hook reference

<!-- Written by tools/hook_reference.py from hooks/specs.py; do not edit. -->

Hooks are [pluggy](https://pluggy.readthedocs.io)'s, with the project name `kvarena`. A plugin is a module
or an object with some of these functions, marked with `kvarena.hooks.hookimpl`. Take any subset of a hook's
arguments, by their names. Installed distributions are found through the entry-point group `kvarena`:

```toml
[project.entry-points.kvarena]
my_plugin = "my_package.my_module"
```

`KVARENA_LOAD_PLUGINS=0` loads none of them, `KVARENA_BLOCK_PLUGINS=my_plugin` leaves one out. Whoever is
registered last is asked first, so an installed plugin answers before the built-in ones. A plugin that
raises is named in the error, and a finalize in which one raises is taken back as a whole.

A `pool` is a `kvarena.pool.ResizablePool`: inside SGLang its own pool behind an adapter, elsewhere kvarena's
`UnifiedKVPool`. `kvarena_transfer_engines` is not asked inside SGLang: it opens its transfer engines itself,
from its own options, and an engine that a plugin answered with would be registered and never used. All other
hooks are asked in both.

| hook | asks | arguments | answer | answers used |
|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = []
    for name, function in vars(specs).items():
        if not name.startswith("kvarena_"):
            continue
        signature = inspect.signature(function)
        arguments = ", ".join(f"`{p.name}: {p.annotation}`" for p in signature.parameters.values())
        returns = str(signature.return_annotation)
        answer = "nothing" if returns == "None" else f"`{returns}`".replace("|", "\\|")
        options = getattr(function, "kvarena_spec")  # noqa: B009 - set by pluggy's marker
        used = "the first that is not None" if options["firstresult"] else "all"
        question = (inspect.getdoc(function) or "").strip()
        cells = (f"`{name}`", question, arguments, answer, "-" if answer == "nothing" else used)
        rows.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE} is not current: run {sys.argv[0]}")
    PAGE.write_text(page())
