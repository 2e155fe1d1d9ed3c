"""Kernels of Kimi K3: arrays in, arrays out. Each op is a folder with one public function."""
