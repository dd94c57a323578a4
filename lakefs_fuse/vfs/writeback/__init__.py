"""Closed files on their way into the store: acknowledged locally, published in order, replayed after a crash."""
