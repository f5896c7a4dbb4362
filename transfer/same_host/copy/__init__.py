"""Copies between mapped arenas: kernels, host threads, and the clocks that tell when they end."""
