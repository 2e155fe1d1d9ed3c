"""Kimi K3 in JAX: config, modules, weights, tokenizer, LoRA and sampling."""
