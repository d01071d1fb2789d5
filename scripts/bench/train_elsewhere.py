"""One process of a timed training run in another framework, in an environment without TensorFlow."""

from __future__ import annotations

import faulthandler
import json
import os

from bench.models import TASKS
from bench.turns import parse_arguments, run


def main() -> None:
    arguments = parse_arguments("jax", "torch")
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    cores = sorted(os.sched_getaffinity(0))
    if arguments.workers > 1:  # JAX has a thread for each core that it may use
        os.sched_setaffinity(0, [cores[k] for k in range(arguments.index, len(cores), arguments.workers)] or cores)
    task, addresses = TASKS[arguments.model], json.loads(os.environ.get("BENCH_ADDRESSES", "[]"))
    if arguments.way == "jax":
        from bench import jax_way

        run(arguments, jax_way.train(task, arguments.index, addresses))
        return
    from bench import torch_way

    run(arguments, torch_way.train(task, arguments.index, addresses, arguments.intra))


if __name__ == "__main__":
    main()
