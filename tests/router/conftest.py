"""Fixtures of the router's tests: the HTTP door in front of a scripted Frontend."""

from anthropic_door import claude, claude_http, claude_port, speaker
from http_door import frontend, http, openai_client, port

__all__ = ["claude", "claude_http", "claude_port", "frontend", "http", "openai_client", "port", "speaker"]
