"""API keys: who may ask, in whose name, and whose cache they share."""
