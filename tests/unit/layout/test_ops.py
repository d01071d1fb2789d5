"""Single ops: results that depend on one example only combine to the values for the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist.layout import Elements, Examples, Mean, PerExample, Replicated, Sum, Unknown
from tests.unit.layout.graphs import Case

SIZES = (1, 4, 2)
BATCH = sum(SIZES)
SHAPES: dict[str, tuple[int, ...]] = {"v": (6,), "w": (6,), "m": (4, 4), "n": (4, 4), "s": (5, 6), "image": (8, 8, 3)}
INTEGERS = {"i": (6,), "label": ()}
special, linalg = tf.math.special, tf.linalg

Made = Callable[..., tf.Tensor]


def symmetric(m):
    return m + linalg.matrix_transpose(m) + 9 * tf.eye(4, dtype=m.dtype)


def absolute(function: Made) -> Made:
    return lambda m: tf.abs(function(tf.cast(m, tf.complex128)))


def dilated(image):
    return tf.nn.convolution(image, tf.ones([3, 3, 3, 2]), padding="SAME", dilations=[2, 2])


def causal(s):
    return tf.nn.convolution(tf.pad(s, [[0, 0], [4, 0], [0, 0]]), tf.ones([3, 6, 2], s.dtype), dilations=[2])


def projected(image):
    transform = tf.constant([[0.9, 0.1, 1.0, 0.0, 1.1, -1.0, 0.0, 0.0]])
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=image,
        transforms=transform,
        output_shape=[8, 8],
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="WRAP",
    )


def boxes_of(image):
    count = tf.shape(image)[0]
    box = tf.tile(tf.constant([[0.1, 0.2, 0.8, 0.9]]), [count, 1])
    return tf.image.crop_and_resize(image, box, tf.range(count), [4, 4])


def of_each(v, label):
    """As in deep Q-learning: the value of the selected action."""
    return tf.gather_nd(v, tf.stack([tf.range(tf.shape(v)[0]), tf.cast(label, tf.int32)], 1))


def of_each_by_columns(v, label):
    rows = tf.range(tf.shape(v)[0], dtype=tf.int32)
    return tf.gather_nd(v, tf.concat([rows[:, None], tf.cast(label, tf.int32)[:, None]], 1))


OPS: dict[str, Made] = {
    "bessel": lambda v: tf.math.bessel_i0(v) + tf.math.bessel_i1(v) + special.bessel_j0(v) + special.bessel_j1(v),
    "bessel of the second kind": lambda v: special.bessel_k0(v) + special.bessel_k1e(v) + special.bessel_y0(v),
    "integrals": lambda v: special.dawsn(v) + special.expint(v) + special.fresnel_cos(v) + special.spence(v),
    "determinant": lambda m: 2 * linalg.det(m),
    "logarithm of a determinant": lambda m: linalg.slogdet(m)[1],
    "logdet": lambda m: linalg.logdet(symmetric(m)),
    "inverse": lambda m: linalg.inv(symmetric(m)),
    "square root": lambda m: linalg.sqrtm(symmetric(m)),
    "cholesky": lambda m: linalg.cholesky(symmetric(m)),
    "eigenvalues": lambda m: linalg.eigvalsh(symmetric(m)),
    "singular values": lambda m: linalg.svd(m, compute_uv=False),
    "qr": lambda m: tf.abs(linalg.qr(m)[1]),
    "lu": lambda m: linalg.lu(symmetric(m))[0],
    "trace": lambda m: 2 * linalg.trace(m),
    "diagonal": lambda m: linalg.diag_part(m, k=-1),
    "matrix of a diagonal": lambda v: linalg.diag(v, k=1),
    "another diagonal": lambda m, v: linalg.set_diag(m, v[:, :4]),
    "band": lambda m: linalg.band_part(m, 1, 0),
    "solution": lambda m, n: linalg.solve(symmetric(m), n),
    "one matrix for all": lambda m: linalg.triangular_solve(tf.eye(4, dtype=m.dtype) * 3 + 1, m),
    "columns of examples": lambda v: tf.transpose(
        linalg.solve(linalg.band_part(tf.ones([6, 6], v.dtype), -1, 0), tf.transpose(v))
    ),
    "triangular solution": lambda m, n: linalg.triangular_solve(symmetric(m), n),
    "cholesky solution": lambda m, n: linalg.cholesky_solve(linalg.cholesky(symmetric(m)), n),
    "tridiagonal product": lambda m: linalg.tridiagonal_matmul(m[:, :3], m, "compact"),
    "cross product": lambda v, w: linalg.cross(v[:, :3], w[:, 3:]),
    "diagonal by einsum": lambda m: tf.einsum("bii->b", m),
    "fft": absolute(tf.signal.fft),
    "ifft": absolute(tf.signal.ifft),
    "fft of images": absolute(lambda m: tf.signal.ifft2d(tf.signal.fft2d(m))),
    "rfft": lambda v: tf.signal.irfft(tf.signal.rfft(v)),
    "rfft of images": lambda m: tf.signal.irfft2d(tf.signal.rfft2d(m)),
    "fft of volumes": lambda image: tf.abs(tf.signal.rfft3d(image)),
    "cosines": lambda v: tf.signal.dct(v, norm="ortho"),
    "frames": lambda v: tf.signal.frame(v, 4, 2),
    "short-time fft": lambda v: tf.abs(tf.signal.stft(v, 4, 2)),
    "shifted": lambda v: tf.signal.fftshift(v, axes=[1]),
    "roll": lambda s: tf.roll(s, [1, 2], [1, 2]),
    "running log-sum": lambda v: tf.math.cumulative_logsumexp(v, 1),
    "holes in a convolution": dilated,
    "causal convolution": causal,
    "space and back": lambda image: tf.batch_to_space(
        tf.nn.relu(tf.space_to_batch(image, [2, 4], [[0, 0], [0, 0]])), [2, 4], [[0, 0], [0, 0]]
    ),
    "lanczos": lambda image: tf.image.resize(image, [5, 4], "lanczos3"),
    "antialiased": lambda image: tf.image.resize(image, [5, 4], antialias=True),
    "padded": lambda image: tf.image.resize_with_pad(image, 12, 10),
    "patches": lambda image: tf.image.extract_patches(image, [1, 3, 3, 1], [1, 2, 2, 1], [1, 1, 1, 1], "SAME"),
    "hue": lambda image: tf.image.adjust_hue(image, 0.1),
    "saturation": lambda image: tf.image.adjust_saturation(image, 1.2),
    "hsv": lambda image: tf.image.hsv_to_rgb(tf.image.rgb_to_hsv(image)),
    "gradients of images": lambda image: tf.image.image_gradients(image)[0],
    "projected": projected,
    "cropped": boxes_of,
    "pooled with positions": lambda image: tf.nn.max_pool_with_argmax(image, 2, 2, "SAME")[0],
    "quantized by channel": lambda v: tf.quantization.fake_quant_with_min_max_vars_per_channel(
        tf.cast(v, tf.float32), tf.zeros([6]), tf.range(1.0, 7.0)
    ),
    "bits": lambda v: tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(v, tf.int64), 2**63 - 1), v.dtype),
    "isotonic": lambda v: tf.nn.isotonic_regression(v)[0],
    "places in a sorted row": lambda v, w: tf.searchsorted(tf.sort(v, 1), w),
    "counts in a row": lambda i: tf.math.bincount(i, axis=-1, minlength=5, maxlength=5),
    "values in a row": lambda i: tf.math.bincount(i, axis=-1, minlength=5, maxlength=5, binary_output=True),
    "all rows by number": lambda v: tf.gather(v, tf.range(tf.shape(v)[0])),
    "one of each": of_each,
    "one of each, by columns": of_each_by_columns,
}


@pytest.fixture
def case():
    built = Case()
    with built.graph.as_default():
        for name, shape in SHAPES.items():
            built.batch(name, *shape, dtype=tf.float32 if name == "image" else tf.float64)
        for name, shape in INTEGERS.items():
            built.batch(name, *shape, dtype=tf.int32)
        yield built


@pytest.fixture
def feeds():
    rng = np.random.default_rng(3)
    values = {name: rng.uniform(0.5, 2, (BATCH, *shape)) for name, shape in SHAPES.items()}
    values["image"] = (values["image"] / 2).astype(np.float32)
    return values | {name: rng.integers(0, 5, (BATCH, *shape)) for name, shape in INTEGERS.items()}


def given(case, function):
    """Returns the batches for a function, by the names of its arguments."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return [case.graph.get_tensor_by_name(f"{name}:0") for name in names]


@pytest.mark.parametrize("name", OPS)
def test_each_example_by_itself(case, feeds, name):
    made = OPS[name](*given(case, OPS[name]))
    numbers = made if made.dtype.is_floating else tf.cast(made, tf.float64)
    single = numbers.dtype == tf.float32
    kinds = case.assert_joins(
        [made, tf.reduce_mean(numbers), tf.reduce_sum(numbers)], feeds, SIZES, rtol=2e-5 if single else 1e-9
    )
    assert kinds == [PerExample(0), Mean(Examples()), Sum()]
    assert kinds[0].mixed_at is None


ALONG_THE_BATCH: dict[str, Made] = {
    "determinant": lambda m: linalg.det(tf.transpose(m, [1, 0, 2])),
    "fft": lambda v: tf.abs(tf.signal.rfft(tf.transpose(v))),
    "running log-sum": lambda v: tf.math.cumulative_logsumexp(v, 0),
    "fewer rows by number": lambda v: tf.gather(v, tf.range(tf.shape(v)[0] // 2)),
    "rows of others by number": lambda s, v: tf.gather(tf.reshape(s, [-1, 6]), tf.range(tf.shape(v)[0])),
    "numbers": lambda v: tf.cast(tf.range(tf.shape(v)[0]), tf.float64),
    "positions in the part": lambda image: tf.cast(
        tf.nn.max_pool_with_argmax(image, 2, 2, "SAME", include_batch_in_index=True)[1], tf.float64
    ),
    "blocks of other space": lambda image: tf.batch_to_space(
        tf.space_to_batch(image, [2, 4], [[0, 0], [0, 0]]), [4, 2], [[0, 0], [0, 0]]
    ),
    "scaled matrices": lambda m: linalg.det(m / tf.cast(tf.shape(m)[0], tf.float64)),
    "values in the batch": lambda label: tf.cast(
        tf.math.bincount(label, minlength=5, maxlength=5, binary_output=True), tf.float64
    ),
}


@pytest.mark.parametrize("name", ALONG_THE_BATCH)
def test_what_runs_along_the_batch_is_unknown(case, name):
    made = ALONG_THE_BATCH[name](*given(case, ALONG_THE_BATCH[name]))
    assert isinstance(case.kind(tf.reduce_mean(made)), Unknown)


def test_linear_functions_keep_sums_and_means(case, feeds):
    total, mean = (reduce(case.graph.get_tensor_by_name("m:0"), 0) for reduce in (tf.reduce_sum, tf.reduce_mean))
    made = [function(value) for value in (total, mean) for function in (linalg.diag_part, linalg.trace)]
    made += [tf.math.real(tf.signal.fft(tf.cast(value, tf.complex128))) for value in (total, mean)]
    kinds = case.assert_joins(made, feeds, SIZES, rtol=1e-9)
    assert kinds == [Sum(), Sum(), Mean(Examples()), Mean(Examples()), Sum(), Mean(Examples())]


def test_counts_over_the_batch_are_sums(case, feeds):
    labels = case.graph.get_tensor_by_name("label:0")
    counts = tf.math.bincount(labels, minlength=5, maxlength=5)
    histogram = tf.histogram_fixed_width(case.graph.get_tensor_by_name("m:0"), tf.constant([-1.0, 1.0], tf.float64), 4)
    assert case.assert_joins([counts, histogram], feeds, SIZES) == [Sum(), Sum()]


def test_parts_by_class_are_weighed_by_their_rows(case, feeds):
    values, label = (case.graph.get_tensor_by_name(f"{name}:0") for name in ("v", "label"))
    parts = tf.dynamic_partition(values, tf.cast(label > 1, tf.int32), 2)
    kinds = case.assert_joins([tf.reduce_mean(part) for part in parts] + [tf.reduce_sum(parts[0])], feeds, SIZES)
    assert [type(kind) for kind in kinds] == [Mean, Mean, Sum]
    assert all(isinstance(kind.weight, Elements) for kind in kinds[:2])


DRAWS: dict[str, Made] = {
    "classes": lambda v: tf.cast(tf.random.categorical(v, 3), tf.float64),
    "classes, stateless": lambda v: tf.cast(tf.random.stateless_categorical(v, 3, [1, 2]), tf.float64),
    "gamma": lambda v: tf.random.gamma([], v, dtype=tf.float64),
    "poisson": lambda v: tf.random.poisson([2], v)[0],
    "gamma, stateless": lambda v: tf.random.stateless_gamma(tf.shape(v), [1, 2], 2.0, dtype=v.dtype),
    "gamma of each example, stateless": lambda v: tf.random.stateless_gamma(tf.shape(v), [1, 2], v, dtype=v.dtype),
    "binomial, stateless": lambda v: tf.random.stateless_binomial(tf.shape(v), [1, 2], 5.0, v, v.dtype),
    "poisson for all, stateless": lambda v: v * tf.random.stateless_poisson([], [1, 2], 2.0, v.dtype),
    "contrast": lambda image: tf.image.random_contrast(image, 0.8, 1.2),
    "hue": lambda image: tf.image.random_hue(image, 0.1),
    "cut": lambda image: tf.slice(image, tf.stack([0, tf.random.uniform([], 0, 4, tf.int32), 0, 0]), [-1, 4, 8, 3]),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_for_each_example_and_noise_that_all_share(case, name):
    made = DRAWS[name](*given(case, DRAWS[name]))
    assert [case.kind(t) for t in (made, tf.reduce_mean(made))] == [PerExample(0), Mean(Examples())]


@pytest.mark.parametrize("draw", [lambda: tf.random.gamma([3], 2.0), lambda: tf.random.categorical([[0.1, 0.9]], 3)])
def test_draws_of_a_fixed_shape_are_unknown(case, draw):
    assert isinstance(case.kind(draw()), Unknown)


def test_draws_that_other_examples_parameters_tell_are_unknown(case):
    v = case.graph.get_tensor_by_name("v:0")
    drawn = tf.random.stateless_gamma(tf.shape(v), [1, 2], tf.reverse(v, [0]), dtype=v.dtype)
    assert "do not belong to the same examples" in case.kind(drawn).reason
    of_none = tf.random.stateless_gamma([5, 6], [1, 2], v[:1], dtype=v.dtype)
    assert isinstance(case.kind(of_none), Unknown)


def test_what_is_stitched_of_constants_is_the_same_everywhere(case):
    """Values as well as shapes."""
    stitched = tf.dynamic_stitch([[0, 2], [1]], [[[0.5, 1.0], [2.0, 3.0]], [[4.0, 5.0]]])
    assert case.kind(stitched) == Replicated()


def test_a_function_that_is_an_op_of_its_own_is_followed(case):
    """As for the loops of `tf.nn.ctc_loss`."""
    logits, labels = case.graph.get_tensor_by_name("s:0"), case.graph.get_tensor_by_name("i:0")
    count = tf.shape(logits)[0]
    lengths = tf.fill([count], 2), tf.fill([count], 5)
    loss = tf.nn.ctc_loss(labels[:, :2], tf.cast(logits, tf.float32), *lengths, logits_time_major=False, blank_index=0)
    assert case.kind(tf.reduce_mean(loss)) == Mean(Examples())
