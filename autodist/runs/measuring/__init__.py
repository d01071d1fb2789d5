"""The measurements of a run for the strategy `Auto`: the network, and the computation of a step."""
