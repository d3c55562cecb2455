"""Fixtures of the router's tests: the HTTP door in front of a scripted Frontend."""

from http_door import frontend, http, openai_client, port

__all__ = ["frontend", "http", "openai_client", "port"]
