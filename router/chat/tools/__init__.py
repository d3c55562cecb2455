"""Calls of tools: how models write them, read out of their output, or enforced."""
