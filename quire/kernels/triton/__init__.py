"""The Triton side of `quire.kernels`: imported only once a CUDA tensor turns up, so Triton may be absent."""
