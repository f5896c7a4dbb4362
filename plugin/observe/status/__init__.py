"""Status files: what a process tells of its pool, kept up to date while it runs."""
