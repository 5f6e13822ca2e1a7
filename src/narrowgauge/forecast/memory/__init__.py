"""Predicts memory: lifetimes of allocations, and the peak of the caching allocator."""
