import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.loss import LOSSES, dpo, loss_named

B, T, S = 4, 9, 4
SAMPLED = ["importance_sampling", "ppo", "cispo", "dro"]


def batch(seed=0):
    """Logprobs and every array that a loss takes; with prompt tokens, zero weights and incomplete pairs."""
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(1.0, (B, T))
    sampling = logprobs + rng.normal(0, 0.5, (B, T))
    advantages = rng.normal(0, 1, (B, T))
    weights = rng.uniform(0.5, 2, (B, T)) * (rng.uniform(size=(B, T)) > 0.2)
    sampling[:, :2] = advantages[:, :2] = 0
    segments = np.array(
        [[1, 1, 2, 2, 3, 3, 4, 4, 0], [1] * 4 + [2] * 5, [1] * 9, [0] * 2 + [1, 1, 1, 2, 2, 3, 4]]
    )
    weights[3, 6:] = 1, 1, 0
    arrays = {
        "sampling_logprobs": sampling,
        "advantages": advantages,
        "weights": weights,
        "reference_logprobs": rng.normal(-4, 1, (B, S)),
    }
    arrays = {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}
    return jnp.asarray(logprobs, jnp.float32), arrays | {"segments": jnp.asarray(segments)}


@functools.partial(jax.jit, static_argnums=0)
def value_and_grad(loss, logprobs, arrays):
    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(logprobs, arrays)
    return value, metrics, gradient


def rows(arrays, part):
    return {name: array[part] for name, array in arrays.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up_to_the_whole_batch(name):
    loss, (logprobs, arrays) = loss_named(name), batch()
    value, metrics, gradient = value_and_grad(loss, logprobs, arrays)
    parts = [slice(0, 1), slice(1, 3), slice(3, 4)]
    pieces = [value_and_grad(loss, logprobs[part], rows(arrays, part)) for part in parts]
    np.testing.assert_allclose(sum(piece[0] for piece in pieces), value, rtol=1e-5)
    np.testing.assert_allclose(jnp.concatenate([piece[2] for piece in pieces]), gradient, rtol=1e-6)
    for key in metrics:
        np.testing.assert_allclose(
            sum(piece[1][key] for piece in pieces), metrics[key], rtol=1e-5, err_msg=key
        )
    assert metrics["loss"] == value


def by_hand(name, lp, q, a, w):
    """Loss and gradient of one token in plain Python."""
    r = np.exp(lp - q)
    match name:
        case "cross_entropy":
            return -w * lp, -w
        case "importance_sampling":
            return -w * r * a, -w * r * a
        case "ppo":
            free = r * a <= np.clip(r, 0.8, 1.2) * a
            return -w * min(r * a, np.clip(r, 0.8, 1.2) * a), -w * r * a * free
        case "cispo":
            return -w * min(r, 4.0) * lp * a, -w * min(r, 4.0) * a
        case "dro":
            return -w * (lp * a - 0.025 * (lp - q) ** 2), -w * (a - 0.05 * (lp - q))


@pytest.mark.parametrize("name", ["cross_entropy", *SAMPLED])
@pytest.mark.parametrize("gap", [-2.0, -0.1, 0.0, 0.1, 2.0])
@pytest.mark.parametrize("advantage", [-1.5, 0.7])
def test_loss_and_gradient_of_a_token_have_their_closed_form(name, gap, advantage):
    lp, weight = -1.25, 0.6
    one = {
        name: jnp.full((1, 1), value, jnp.float32)
        for name, value in [("sampling_logprobs", lp - gap), ("advantages", advantage), ("weights", weight)]
    }
    value, _, gradient = value_and_grad(loss_named(name), jnp.full((1, 1), lp, jnp.float32), one)
    expected = by_hand(name, lp, lp - gap, advantage, weight)
    np.testing.assert_allclose((value, gradient[0, 0]), expected, rtol=2e-6)


@pytest.mark.parametrize("name", SAMPLED)
def test_weights_default_to_one(name):
    logprobs, arrays = batch()
    without = {key: array for key, array in arrays.items() if key != "weights"}
    ones = without | {"weights": jnp.ones((B, T))}
    assert loss_named(name)(logprobs, without)[0] == loss_named(name)(logprobs, ones)[0]


@pytest.mark.parametrize("name", SAMPLED)
def test_prompt_tokens_add_nothing(name):
    logprobs, arrays = batch()
    shorter = {key: arrays[key][:, 2:] for key in ("sampling_logprobs", "advantages", "weights")}
    whole, metrics, gradient = value_and_grad(loss_named(name), logprobs, arrays)
    rest, rest_metrics, _ = value_and_grad(loss_named(name), logprobs[:, 2:], shorter)
    np.testing.assert_allclose(whole, rest, rtol=1e-6)
    assert metrics["tokens"] == rest_metrics["tokens"] > 0
    assert not gradient[:, :2].any()


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf, -jnp.inf, -1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_tokens_of_weight_0_add_exactly_nothing_whatever_they_hold(name, poison):
    logprobs, arrays = batch()
    off = arrays["weights"] == 0
    poisoned = arrays | {
        key: jnp.where(off, poison, arrays[key]) for key in ("sampling_logprobs", "advantages")
    }
    clean = value_and_grad(loss_named(name), logprobs, arrays)
    dirty = value_and_grad(loss_named(name), jnp.where(off, poison, logprobs), poisoned)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert off.any() and not clean[2][off].any()


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_an_overflowing_ratio_at_advantage_0_adds_nothing(name):
    arrays = {"sampling_logprobs": jnp.full((1, 2), -200.0), "advantages": jnp.array([[0.0, 0.0]])}
    value, metrics, gradient = value_and_grad(loss_named(name), jnp.full((1, 2), -1.0), arrays)
    assert value == 0 and not gradient.any() and metrics["tokens"] == 0


def test_dro_keeps_its_penalty_where_the_advantage_is_0():
    arrays = {"sampling_logprobs": jnp.full((1, 1), -2.0), "advantages": jnp.zeros((1, 1))}
    value, _, _ = value_and_grad(loss_named("dro"), jnp.full((1, 1), -1.0), arrays)
    np.testing.assert_allclose(value, 0.025)


def test_on_policy_ratio_losses_have_the_policy_gradient():
    logprobs, arrays = batch()
    arrays = arrays | {"sampling_logprobs": logprobs}
    for name in SAMPLED:
        _, metrics, gradient = value_and_grad(loss_named(name), logprobs, arrays)
        np.testing.assert_allclose(
            gradient, -arrays["weights"] * arrays["advantages"], rtol=1e-6, err_msg=name
        )
        assert metrics["ratio"] == metrics["tokens"] and metrics["logprob_gap"] == 0
        assert metrics.get("clipped", 0) == 0


def test_ppo_counts_the_tokens_without_a_gradient():
    ratios = jnp.array([[1.5, 1.5, 1.5, 0.5, 0.5, 1.0]])
    advantages = jnp.array([[1.0, 1.0, -1.0, -1.0, 1.0, 1.0]])
    arrays = {"sampling_logprobs": -1 - jnp.log(ratios), "advantages": advantages}
    _, metrics, gradient = value_and_grad(loss_named("ppo"), jnp.full((1, 6), -1.0), arrays)
    np.testing.assert_array_equal(gradient[0] == 0, [True, True, False, True, False, False])
    assert metrics["clipped"] == 3


def test_cispo_clips_at_its_thresholds_and_keeps_the_gradient():
    arrays = {"sampling_logprobs": jnp.array([[-3.0, -1.0]]), "advantages": jnp.ones((1, 2))}
    loss = loss_named("cispo", {"clip_high_threshold": 2.0})
    _, metrics, gradient = value_and_grad(loss, jnp.full((1, 2), -1.0), arrays)
    np.testing.assert_allclose(gradient, [[-2.0, -1.0]])
    assert metrics["clipped"] == 1


def test_cross_entropy_takes_soft_targets_and_negative_weights():
    logprobs = jnp.log(jnp.array([[[0.5, 0.25], [0.1, 0.9]]]))
    weights = jnp.array([[[0.75, 0.25], [-1.0, 0.0]]])
    value, metrics, gradient = value_and_grad(loss_named("cross_entropy"), logprobs, {"weights": weights})
    np.testing.assert_allclose(value, -(0.75 * np.log(0.5) + 0.25 * np.log(0.25) - np.log(0.1)), rtol=1e-6)
    np.testing.assert_array_equal(gradient, -weights)
    assert metrics["tokens"] == 3


def test_dpo_has_its_closed_form_and_counts_complete_pairs_only():
    logprobs, arrays = batch()
    value, metrics, gradient = value_and_grad(loss_named("dpo", {"beta": 0.3}), logprobs, arrays)
    lp, w, ids, ref = (
        np.asarray(x, np.float64)
        for x in (logprobs, arrays["weights"], arrays["segments"], arrays["reference_logprobs"])
    )
    expected, pairs, wanted = 0.0, 0, np.zeros((B, T))
    for row in range(B):
        for first in (1, 3):
            chosen, rejected = ids[row] == first, ids[row] == first + 1
            if not (w[row] * chosen).any() or not (w[row] * rejected).any():
                continue
            c, d = ((w[row] * lp[row])[side].sum() for side in (chosen, rejected))
            margin = 0.3 * ((c - ref[row, first - 1]) - (d - ref[row, first]))
            expected, pairs = expected + np.log1p(np.exp(-margin)), pairs + 1
            wanted[row] -= 0.3 / (1 + np.exp(margin)) * w[row] * (chosen.astype(float) - rejected)
    assert metrics["pairs"] == pairs == 4
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(
        metrics["margin"], metrics["chosen_reward"] - metrics["rejected_reward"], rtol=1e-5
    )


def test_dpo_at_the_reference_is_log_2_per_pair():
    logprobs, ones = jnp.full((1, 4), -1.5), jnp.ones((1, 4))
    value, metrics = dpo(logprobs, ones, jnp.array([[1, 1, 2, 2]]), jnp.full((1, 2), -3.0))
    np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
    assert metrics["correct"] == 0


def test_dpo_refuses_an_odd_number_of_segments():
    with pytest.raises(ValueError, match="two for each pair; got 3"):
        dpo(jnp.zeros((1, 3)), jnp.ones((1, 3)), jnp.array([[1, 2, 3]]), jnp.zeros((1, 3)))


@pytest.mark.parametrize(
    "name, config, message",
    [
        ("cross_entopy", {}, "no loss 'cross_entopy'. Did you mean cross_entropy?"),
        ("stable_reinforce", {}, "stable_reinforce is not available"),
        ("ppo", {"clip_low_treshold": 0.9}, "Did you mean clip_low_threshold?"),
        ("cross_entropy", {"beta": 0.1}, "It takes none"),
        ("ppo", {"clip_low_threshold": 1.3}, "0 <= low <= high"),
        ("cispo", {"clip_low_threshold": -0.2}, "0 <= low <= high"),
        ("dro", {"beta": float("nan")}, "beta must be a finite number, got nan"),
        ("dro", {"beta": "0.1"}, "beta must be a finite number"),
        ("dpo", {"beta": -1}, "must not be negative"),
    ],
)
def test_unknown_losses_settings_and_values_are_refused(name, config, message):
    with pytest.raises(ValueError) as error:
        loss_named(name, config)
    assert message in str(error.value)


def test_a_missing_array_is_named():
    logprobs, arrays = batch()
    with pytest.raises(ValueError, match="ppo needs advantages; the batch has sampling_logprobs"):
        loss_named("ppo")(logprobs, {"sampling_logprobs": arrays["sampling_logprobs"]})


def test_a_loss_tells_its_arrays_and_settings():
    assert loss_named("cross_entropy").needs == ("weights",)
    assert loss_named("ppo").needs == ("sampling_logprobs", "advantages")
    assert loss_named("ppo").takes == ("sampling_logprobs", "advantages", "weights")
    assert dict(loss_named("ppo").config) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert dict(loss_named("cispo").config) == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    assert dict(loss_named("dro").config) == {"beta": 0.05}
    assert hash(loss_named("ppo")) == hash(loss_named("ppo", {"clip_low_threshold": 0.8}))
