"""Steps that are functions: `ad.function`, and what models of Keras train and evaluate by."""
