"""Python with TensorFlow imported already, forked for each script that a test starts."""
