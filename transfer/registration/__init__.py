"""Registers only bytes that have memory: regions, the ledger, and the gate that holds transfers meanwhile."""
