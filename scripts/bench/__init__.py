"""The benchmark suite: what training does with a lake, through this filesystem and through what one would use instead.

`python -m scripts.bench` runs it. From the bottom up: `results` (what is written down), `figures` (medians, ratios),
`machine` (the kernel's side: caches, processes), `tally` (what HAProxy saw, what it would cost), `access`
(how bytes are reached: paths, or a store client), `worker` (runs a job in a process of its own), `jobs` (what is
timed), `stage` (the store, the proxy, the data), `peers` (who is compared), `method` (rounds), `workloads` and `groups`
(what is done, and in which order), `verdict` (who is behind), `report`, `plots` and `tables`.
"""
