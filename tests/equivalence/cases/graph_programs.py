"""The matrix in graph mode."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import Results, Trainer, own, register
from tests.equivalence.cases.graph_models import build, make_graph_optimizer
from tests.equivalence.cases.models import MODELS, OPTIMIZERS, make_batches

v1 = tf.compat.v1


def train_graph(ad: Trainer, model: str, optimizer: str, clip_norm: float | None = None) -> Results:
    """Every worker feeds its own part of each batch, and fetches the loss of that part."""
    batches = make_batches(model)
    with tf.Graph().as_default(), ad.scope():
        net, opt = build(model), make_graph_optimizer(optimizer)
        pairs = opt.compute_gradients(net.loss)
        if clip_norm is not None:
            clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], clip_norm)
            pairs = list(zip(clipped, (variable for _, variable in pairs), strict=True))
        with tf.control_dependencies(net.changes):
            train = opt.apply_gradients(pairs, global_step=v1.train.get_or_create_global_step())
        session = ad.create_distributed_session()
        session.run(v1.global_variables_initializer())
        losses, counts = [], []
        for x, y in zip(batches.x, batches.y, strict=True):
            mine_x, mine_y = own(ad, x), own(ad, y)
            loss, _ = session.run([net.loss, train], {net.x: mine_x, net.y: mine_y})
            losses.append(loss)
            counts.append(len(mine_x))
        variables = session.run({v.op.name: v for v in v1.global_variables()})
    return variables | {"worker:loss": np.array(losses), "worker:examples": np.array(counts)}


for _optimizer in OPTIMIZERS:
    for _model in MODELS:
        _program = functools.partial(train_graph, model=_model, optimizer=_optimizer)
        register(f"graph-{_model}-{_optimizer}", _program)
        register(f"graph-{_model}-{_optimizer}-clipped", functools.partial(_program, clip_norm=0.1))
