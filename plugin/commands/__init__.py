"""The ``kvarena`` command and its subcommands, a folder each."""
