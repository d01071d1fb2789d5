"""Function front end: `ad.function`, and the steps by which Keras models train and evaluate."""
