"""One GPU (or the CPU): token ids in and out, with a paged KV pool, a scheduler, a model and an event publisher."""
