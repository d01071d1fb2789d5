"""Word vectors by skip-gram with negative sampling, in a graph with a session; both tables have sparse gradients.

The words come from Python's own help texts (`pydoc_data.topics`). Each word predicts its neighbours in the text,
against randomly drawn words (Mikolov et al., 2013, "Distributed Representations of Words and Phrases and their
Compositionality").

    python examples/skip_gram.py                                           # two workers here, all-reduce
    python examples/skip_gram.py --cluster examples/cluster_parallax.yml   # the tables on parameter servers
"""

import argparse
import collections
import pathlib
import re
from pydoc_data.topics import topics

from autodist import AutoDist  # before TensorFlow, to suppress its startup messages

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cluster", default=pathlib.Path(__file__).with_name("cluster.yml"), help="YAML of the machines")
parser.add_argument("--steps", type=int, default=4000)
arguments = parser.parse_args()

VOCABULARY, WIDTH, WINDOW, NEGATIVES, BATCH = 1500, 64, 4, 8, 512

words = re.findall(r"[a-z_]+", " ".join(topics.values()).lower())
counts = collections.Counter(words).most_common(VOCABULARY)
vocabulary = [word for word, _ in counts]
number = {word: i for i, word in enumerate(vocabulary)}

# Frequent words predict little about their neighbours: the more frequent a word, the more of its uses are left out.
rng = np.random.default_rng(1)
frequency = np.array([count for _, count in counts]) / len(words)
keep = np.minimum(1, np.sqrt(1e-3 / frequency))
text = np.array([number[word] for word in words if word in number])
text = text[rng.random(len(text)) < keep[text]]
pairs = np.concatenate(
    [np.stack(pair, axis=1) for d in range(1, WINDOW + 1) for pair in ((text[:-d], text[d:]), (text[d:], text[:-d]))]
)
noise = np.cumsum(frequency**0.75) / np.sum(frequency**0.75)

ad = AutoDist(arguments.cluster)
with tf.Graph().as_default(), ad.scope():
    tf.compat.v1.set_random_seed(1)
    words_in = tf.compat.v1.placeholder(tf.int32, [None], "words")
    neighbours_in = tf.compat.v1.placeholder(tf.int32, [None], "neighbours")
    negatives_in = tf.compat.v1.placeholder(tf.int32, [None, NEGATIVES], "negatives")

    uniform = tf.random_uniform_initializer(-0.5 / WIDTH, 0.5 / WIDTH)
    vectors = tf.compat.v1.get_variable("vectors", [VOCABULARY, WIDTH], initializer=uniform)
    contexts = tf.compat.v1.get_variable("contexts", [VOCABULARY, WIDTH], initializer=tf.zeros_initializer())

    word = tf.nn.embedding_lookup(vectors, words_in)
    right = tf.reduce_sum(word * tf.nn.embedding_lookup(contexts, neighbours_in), axis=1)
    wrong = tf.einsum("bw,bnw->bn", word, tf.nn.embedding_lookup(contexts, negatives_in))
    loss = tf.reduce_mean(tf.nn.softplus(-right) + tf.reduce_sum(tf.nn.softplus(wrong), axis=1))
    train = tf.compat.v1.train.AdagradOptimizer(2.0).minimize(loss)

    sess = ad.create_distributed_session()
    sess.run(tf.compat.v1.global_variables_initializer())
    losses = []
    for step in range(1, arguments.steps + 1):
        # Every worker draws the same global batch and feeds its own part of it.
        batch = pairs[rng.integers(len(pairs), size=BATCH)]
        negatives = np.searchsorted(noise, rng.random((BATCH, NEGATIVES)))
        batch = np.array_split(batch, ad.num_workers)[ad.worker_index]
        negatives = np.array_split(negatives, ad.num_workers)[ad.worker_index]
        feeds = {words_in: batch[:, 0], neighbours_in: batch[:, 1], negatives_in: negatives}
        value, _ = sess.run([loss, train], feeds)
        losses.append(value)
        if step % 500 == 0 and ad.is_chief:
            print(f"step {step}: loss {np.mean(losses[-500:]):.3f}")
    table = sess.run(vectors)

if ad.is_chief:
    print(f"loss {np.mean(losses[-500:]):.3f}; without any training {(1 + NEGATIVES) * np.log(2):.3f}")
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    for query in ("class", "list", "int", "async", "exception", "float", "import"):
        nearest = np.argsort(-table @ table[number[query]])[1:6]
        print(f"{query:>10}: {', '.join(vocabulary[i] for i in nearest)}")
