"""What waits for a GPU: kernels for statistics of attention, and the measurements that decide on them."""
