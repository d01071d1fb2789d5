"""`keras.distribution` on TensorFlow: the devices that it lists, and the distributions that a script sets."""
