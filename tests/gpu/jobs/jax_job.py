"""A training step compiled by JAX, with Adam written out. --all divides each batch among all GPUs."""

import os

import common


def main():
    options = common.parse(
        __doc__, lambda parser: parser.add_argument("--all", action="store_true")
    )
    # Read when JAX starts. Without the first, JAX takes three quarters of the GPU.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["JAX_PLATFORMS"] = options.device
    if options.device == "cuda":
        os.environ["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
    import jax
    import jax.numpy as jnp
    import numpy

    run = common.Run(options)
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [
        jax.random.normal(keys[0], (common.WIDTH, 1024)) * 0.05,
        jax.random.normal(keys[1], (1024, 1)) * 0.05,
    ]
    moments = [[jnp.zeros_like(weight) for weight in weights] for _ in range(2)]

    mesh = jax.sharding.Mesh(numpy.array(jax.devices()), ("data",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    copied = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    if options.all:
        weights, moments = jax.device_put((weights, moments), copied)

    def loss_of(weights, points):
        answers = jnp.tanh(points @ weights[0]) @ weights[1]
        return jnp.mean((answers[:, 0] - points.sum(1)) ** 2)

    @jax.jit
    def advance(weights, moments, key):
        points = jax.random.normal(key, (64, common.WIDTH))
        if options.all:
            points = jax.lax.with_sharding_constraint(points, spread)
        loss, slopes = jax.value_and_grad(loss_of)(weights, points)
        first = [0.9 * old + 0.1 * slope for old, slope in zip(moments[0], slopes)]
        second = [0.999 * old + 0.001 * slope**2 for old, slope in zip(moments[1], slopes)]
        weights = [w - 1e-3 * f / (jnp.sqrt(s) + 1e-8) for w, f, s in zip(weights, first, second)]
        return weights, [first, second], loss

    for step in run.steps():
        weights, moments, loss = advance(weights, moments, jax.random.fold_in(keys[2], step))
        run.say(step, loss)
    run.end(weights=common.digest(*[numpy.asarray(weight) for weight in weights]))


if __name__ == "__main__":
    main()
