"""The matrix in graph mode, and its reference for the model whose examples see one another."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import Array, Results, Trainer, own, register
from tests.equivalence.cases.graph_models import build, make_graph_optimizer
from tests.equivalence.cases.in_parts import SHAPES, cut_for_feeds, weighted_mean
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


def train_graph_in_parts(_: Trainer, optimizer: str, cut: Callable[[Array], list[Array]]) -> Results:
    """As `in_parts.train_in_parts`, in a graph."""
    batches = make_batches("convolution")
    with tf.Graph().as_default(), v1.Session() as session:
        net, opt = build("convolution"), make_graph_optimizer(optimizer)
        pairs = opt.compute_gradients(net.loss)
        given = [v1.placeholder(tf.float64, v.shape) for _, v in pairs]
        step = v1.train.get_or_create_global_step()
        apply = opt.apply_gradients(list(zip(given, (v for _, v in pairs), strict=True)), global_step=step)
        with tf.control_dependencies(net.changes):
            changed = [v.read_value() for v in net.averages]
        session.run(v1.global_variables_initializer())
        losses = []
        for x, y in zip(batches.x, batches.y, strict=True):
            before = session.run(list(net.averages))
            made, counts = [], []
            for part_x, part_y in zip(cut(x), cut(y), strict=True):
                _load(session, net.averages, before)
                fetches = [net.loss, *(g for g, _ in pairs), *changed]
                made.append(session.run(fetches, {net.x: part_x, net.y: part_y}))
                counts.append(len(part_x))
            loss, *rest = (weighted_mean(values, counts) for values in zip(*made, strict=True))
            session.run(apply, dict(zip(given, rest[: len(pairs)], strict=True)))
            _load(session, net.averages, rest[len(pairs) :])
            losses.append(loss)
        variables = session.run({v.op.name: v for v in v1.global_variables()})
    counts = [len(x) for x in batches.x]
    return variables | {"worker:loss": np.array(losses), "worker:examples": np.array(counts)}


def _load(session: v1.Session, variables: list[tf.Variable], values: list[Array]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.load(value, session)


for _optimizer in OPTIMIZERS:
    for _model in MODELS:
        _program = functools.partial(train_graph, model=_model, optimizer=_optimizer)
        register(f"graph-{_model}-{_optimizer}", _program)
        register(f"graph-{_model}-{_optimizer}-clipped", functools.partial(_program, clip_norm=0.1))
    for _w, _r in SHAPES:
        _cut = functools.partial(cut_for_feeds, workers=_w, replicas=_r)
        register(
            f"graph-convolution-{_optimizer}-in-{_w}x{_r}",
            functools.partial(train_graph_in_parts, optimizer=_optimizer, cut=_cut),
        )
