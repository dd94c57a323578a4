"""Work on a whole lake beside its mounts: folding, packing in place, collecting garbage, checking and repairing."""
