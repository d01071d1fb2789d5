"""A classifier of handwritten digits in the style of TensorFlow 1: a graph, placeholders and a session.

The data are 1797 images of 8 × 8 pixels in `digits.npz`, one fifth of them held out as the test set.

    python examples/digits_tf1.py                                       # two workers here, all-reduce
    python examples/digits_tf1.py --cluster examples/cluster_ps.yml     # two workers here, parameter servers
"""

import argparse
import pathlib

from autodist import AutoDist  # before TensorFlow, to suppress its startup messages

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cluster", default=pathlib.Path(__file__).with_name("cluster.yml"), help="YAML of the machines")
parser.add_argument("--data", default=pathlib.Path(__file__).with_name("digits.npz"), help="images and their labels")
parser.add_argument("--epochs", type=int, default=15)
arguments = parser.parse_args()

with np.load(arguments.data) as digits:
    train_x, test_x = (digits[name].reshape(-1, 8, 8, 1).astype("float32") / 16 for name in ("train_x", "test_x"))
    train_y, test_y = (digits[name].astype("int64") for name in ("train_y", "test_y"))


def convolution(inputs: tf.Tensor, name: str, channels: int, stride: int) -> tf.Tensor:
    with tf.compat.v1.variable_scope(name):
        kernel = tf.compat.v1.get_variable("kernel", [3, 3, inputs.shape[-1], channels])
        bias = tf.compat.v1.get_variable("bias", [channels], initializer=tf.zeros_initializer())
    return tf.tanh(tf.nn.conv2d(inputs, kernel, strides=stride, padding="SAME") + bias)


ad = AutoDist(arguments.cluster)
with tf.Graph().as_default(), ad.scope():
    tf.compat.v1.set_random_seed(1)
    x = tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 1], "images")
    y = tf.compat.v1.placeholder(tf.int64, [None], "labels")

    features = convolution(x, "first", channels=16, stride=1)
    features = convolution(features, "second", channels=32, stride=2)
    features = tf.reshape(features, [-1, 4 * 4 * 32])
    kernel = tf.compat.v1.get_variable("logits/kernel", [4 * 4 * 32, 10])
    bias = tf.compat.v1.get_variable("logits/bias", [10], initializer=tf.zeros_initializer())
    logits = features @ kernel + bias

    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    train = tf.compat.v1.train.MomentumOptimizer(learning_rate=0.05, momentum=0.9).minimize(loss)
    predicted = tf.argmax(logits, axis=1)

    sess = ad.create_distributed_session()
    sess.run(tf.compat.v1.global_variables_initializer())
    rng = np.random.default_rng(1)  # the same seed on all workers, so that all draw the same batches
    for epoch in range(1, arguments.epochs + 1):
        losses = []
        order = rng.permutation(len(train_x))
        for start in range(0, len(order), 64):
            batch = order[start : start + 64]
            batch = np.array_split(batch, ad.num_workers)[ad.worker_index]  # each worker feeds its own part
            value, _ = sess.run([loss, train], {x: train_x[batch], y: train_y[batch]})
            losses.append(value)
        if ad.is_chief:
            print(f"epoch {epoch}: loss {np.mean(losses):.4f}")
    accuracy = np.mean(sess.run(predicted, {x: test_x}) == test_y)

if ad.is_chief:
    print(f"test accuracy {accuracy:.4f}")
