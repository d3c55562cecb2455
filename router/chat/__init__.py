"""Conversations: what is said in them, how a model reads them, and what it says back."""
