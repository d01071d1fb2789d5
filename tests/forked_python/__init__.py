"""A Python process with TensorFlow already imported, forked for each script that a test starts."""
