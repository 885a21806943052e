"""Kernels for statistics of attention on a GPU, and the measurements that decide on them."""
