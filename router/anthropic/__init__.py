"""Anthropic's dialect of the HTTP door."""
