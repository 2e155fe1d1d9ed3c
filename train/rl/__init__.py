"""Reinforcement learning: environments, rollouts, objective, loop."""
