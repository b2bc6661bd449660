"""Pretrain, or continue the training of, a Parallel DMTD model.

    python tools/train.py --config examples/quickstart/model.yaml --data.train '[data/train]'
    torchrun --nproc-per-node 2 tools/train.py --config a.yaml --parallel.pipeline 2 --optimizer.lr 1e-4

Settings come from YAML files and from dotted overrides; the later one wins. A run with `checkpoint.dir` goes on from its newest
checkpoint when it is started again.
"""

# Megatron's checkpoint writer starts a helper process that imports this file again: nothing heavy may be imported at its head.
import sys


def main() -> int:
    """Exit status: 0 done, 2 refused (the message says what to change)."""
    from megatron_dmtd.config import make_parser, parse, to_config
    from megatron_dmtd.errors import DMTDError

    try:
        config = to_config(parse(make_parser(description=__doc__ or "")))
        from megatron_dmtd.platform import prepare_megatron

        platform = prepare_megatron()
        from megatron_dmtd.parallel.groups import shut_down
        from megatron_dmtd.training.loop import run_training

        run_training(config, platform)
        shut_down()
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
