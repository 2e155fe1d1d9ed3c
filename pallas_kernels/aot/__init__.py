"""Kernels compiled for chips that are not here, and what the compilers say about them."""
