"""The benchmark suite: what training does with a lake, through this filesystem and through what one would use instead.

`python -m scripts.bench` runs it. From the bottom up: `results` (what is written down), `figures` (medians, ratios),
`machine` (the kernel's side: caches, processes), `tally` (what HAProxy saw, what it would cost), `access`
(how bytes are reached: paths, or a store client), `jobs` (what is timed), `worker` (runs a job in a process of its own),
`stage` (the store, the proxy, the data), `peers` (who is compared), `groups` (workloads and in which order), `method`
(rounds), `verdict` (who is behind), `report` and `plots`. Nothing below imports what is above it.
"""
