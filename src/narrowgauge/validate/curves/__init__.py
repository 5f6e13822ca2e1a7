"""Compares finished training runs: our own paired runs, or logs of other tools."""
