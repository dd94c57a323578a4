"""Simulated lakes, and an independent reader that checks them."""
