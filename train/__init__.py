"""Training of K3: losses, data, optimizers, loops and reinforcement learning."""
