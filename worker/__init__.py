"""One GPU (or the CPU): token ids in and out, with a paged KV pool, a scheduler and a model."""
