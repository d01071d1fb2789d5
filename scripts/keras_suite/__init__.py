"""Keras's own tests, run within `ad.scope()`; the implementation of scripts/keras_tests."""
