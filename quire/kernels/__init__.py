"""Pure tensor functions, each with a Triton kernel for CUDA tensors and a plain-torch twin for any device."""
