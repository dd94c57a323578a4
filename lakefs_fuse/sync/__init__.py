"""Primitives that tasks of one trio loop wait on: locks, wakeups, budgets, nurseries."""
