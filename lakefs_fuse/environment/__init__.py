"""What a node is given from outside: clocks, randomness, worker threads, the local disk, fail points."""
