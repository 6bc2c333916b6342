"""Triton implementations. Imported only when a tensor lives on a GPU: Triton may be absent elsewhere."""
