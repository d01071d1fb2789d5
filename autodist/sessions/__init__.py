"""Sessions for scripts of TensorFlow 1: what one run of a session is asked, fed and made of."""
