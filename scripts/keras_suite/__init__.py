"""Keras's own tests, run within `ad.scope()`: what scripts/keras_tests runs."""
