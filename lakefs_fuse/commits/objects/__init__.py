"""Objects that commits made unreferenced: the queue that deletes them."""
