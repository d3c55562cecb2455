"""The front: text in and out, cache-aware routing, and the doors that clients use."""
