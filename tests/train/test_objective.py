import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.loss import loss_named
from train.rl.objective import gap_grows, group_advantages, reference_kl


def test_advantages_are_standardised_within_each_group():
    rewards = np.array([1.0, 0.0, 5.0, 0.0, 7.0, 9.0, 0.0])
    groups = np.array([3, 3, 8, 3, 8, 8, 3])
    result = group_advantages(rewards, groups)
    for group in (3, 8):
        advantages = result.advantages[groups == group]
        np.testing.assert_allclose((advantages.mean(), advantages.std()), (0, 1), atol=1e-5)
    np.testing.assert_allclose(result.advantages[:2], [np.sqrt(3), -1 / np.sqrt(3)], rtol=1e-4)
    assert result.kept.all() and (result.groups, result.groups_kept) == (2, 2)


def test_advantages_ignore_the_scale_and_offset_of_a_groups_rewards():
    rewards, groups = np.array([1.0, 0.0, 0.5, 0.25]), np.zeros(4, int)
    same = group_advantages(100 * rewards - 7, groups)
    np.testing.assert_allclose(same.advantages, group_advantages(rewards, groups).advantages, rtol=1e-4)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6 / 3])
def test_groups_without_spread_are_dropped(reward):
    rewards = np.array([reward] * 7 + [1.0, 0.0, 0.4])
    groups = np.array(["a"] * 7 + ["b", "b", "alone"])
    result = group_advantages(rewards, groups)
    np.testing.assert_array_equal(result.kept, [False] * 7 + [True, True, False])
    assert not result.advantages[~result.kept].any()
    assert (result.groups, result.groups_kept) == (3, 1)


def test_dropped_groups_count_no_tokens_in_the_losses():
    advantages = group_advantages(np.array([1.0, 1.0, 1.0, 0.0]), np.array([0, 0, 1, 1])).advantages
    arrays = {
        "sampling_logprobs": jnp.full((4, 5), -1.0),
        "advantages": jnp.repeat(advantages[:, None], 5, 1),
    }
    _, metrics = loss_named("ppo")(jnp.full((4, 5), -1.0), arrays)
    assert metrics["tokens"] == 10


def test_no_trajectories_give_no_advantages():
    result = group_advantages(np.zeros(0), np.zeros(0, int))
    assert result.advantages.shape == (0,) and (result.groups, result.groups_kept) == (0, 0)


def test_a_reward_that_is_not_finite_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"trajectories \[1, 2\]"):
        group_advantages(np.array([0.0, np.nan, np.inf]), np.zeros(3, int))


def test_the_reference_kl_estimates_the_divergence_without_bias():
    rng = np.random.default_rng(0)
    policy, reference = (np.log(rng.dirichlet(np.ones(5))) for _ in range(2))
    exact = np.sum(np.exp(policy) * (policy - reference))
    every = [
        jnp.asarray(x, jnp.float32) for x in (policy, reference, np.exp(policy))
    ]  # weighted: the expectation
    np.testing.assert_allclose(reference_kl(*every)[0], exact, rtol=1e-5)


def test_the_reference_kl_is_never_negative_and_0_where_both_agree():
    logprobs = jnp.linspace(-4, 0, 9)
    for offset in (-1.0, -1e-4, 1e-4, 1.0):
        assert reference_kl(logprobs, logprobs + offset, jnp.ones(9))[0] > 0
    kl, gradient = jax.value_and_grad(lambda lp: reference_kl(lp, logprobs, jnp.ones(9))[0])(logprobs)
    assert kl == 0 and not gradient.any()


def test_the_reference_kl_has_its_gradient_and_counts_weighted_tokens_only():
    logprobs, reference = jnp.array([-1.0, -2.0, jnp.nan]), jnp.array([-1.5, -1.0, -jnp.inf])
    weights = jnp.array([1.0, 0.5, 0.0])
    (kl, metrics), gradient = jax.value_and_grad(reference_kl, has_aux=True)(logprobs, reference, weights)
    d = np.array([-0.5, 1.0])
    np.testing.assert_allclose(kl, np.sum([1.0, 0.5] * (np.exp(d) - d - 1)), rtol=1e-6)
    np.testing.assert_allclose(gradient, [*([1.0, 0.5] * (1 - np.exp(d))), 0], rtol=1e-5)
    assert metrics["tokens"] == 2 and metrics["kl"] == kl


def test_a_growing_gap_is_noticed_and_a_flat_or_tiny_one_is_not():
    noise = np.random.default_rng(0).uniform(0.9, 1.1, 30)
    assert gap_grows(list(noise * np.linspace(0.011, 0.036, 30)))
    assert not gap_grows(list(noise * 0.011))
    assert not gap_grows(list(noise * np.linspace(1e-7, 1e-5, 30)))
    assert not gap_grows([0.01] * 8 + [1.0] * 7)
