"""Session front end for TensorFlow 1 scripts: the requests, feeds and programs of a session's runs."""
