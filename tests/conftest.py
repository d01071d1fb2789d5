"""What holds for all tests."""

from __future__ import annotations

import os

import hypothesis

# Before anything imports TensorFlow, and for the processes that tests start: errors and warnings only.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# How long an example takes says more of a busy machine than of the code. Before a change is taken, examples are those
# of a fixed seed; elsewhere every run draws others.
hypothesis.settings.register_profile("autodist", deadline=None, print_blob=True, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("autodist")
