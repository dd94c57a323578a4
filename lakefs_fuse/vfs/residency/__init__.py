"""Which bytes of the lake are on this node: warming, eviction and pins by path."""
