"""What others can see of a pool: its timeline, status file, metrics and picture."""
