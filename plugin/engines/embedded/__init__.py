"""The embedded engine: a small but real prefill/decode engine over the unified pool.

`kvarena.plugin.engines.embedded.engine.Engine` leads a pool from plan to close the way an engine
does: refusals, reserve, sink, capture, measure, finalize, re-register. `PrefillServer`,
`DecodeServer` and `SingleServer` serve requests on it, and the module ``worker`` is the process
that runs one of them.
"""
