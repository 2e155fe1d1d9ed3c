"""The command line of k3jax.weights: look into a checkpoint, convert one."""

import argparse
import logging
import re
import sys
from collections.abc import Sequence

from k3jax.weights.checkpoint import MAX_SHARD_BYTES

_EXAMPLES = """examples:
  python -m k3jax.weights inspect Kimi-K3                     what a checkpoint holds, from its headers
  python -m k3jax.weights inspect config.json                 the same from a config alone
  python -m k3jax.weights convert Kimi-K3 K3-bf16 --to bf16   unpack the routed experts
  python -m k3jax.weights convert mine out --to mxfp4 --shard-size 2GB
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 after a line on what is wrong; argparse exits with 2."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    try:
        args.run(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m k3jax.weights", description=__doc__, epilog=_EXAMPLES, formatter_class=raw
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    look = commands.add_parser("inspect", help="layer kinds, parameters, bytes and dtypes by part")
    look.add_argument("path", metavar="PATH", help="checkpoint folder or config.json")
    look.set_defaults(run=_inspect)
    change = commands.add_parser(
        "convert",
        help="routed experts bf16 <-> MXFP4, other shard sizes",
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    change.add_argument("source", metavar="SRC", help="checkpoint folder")
    change.add_argument(
        "target", metavar="DST", help="folder to write; a checkpoint there is replaced when all is done"
    )
    change.add_argument(
        "--to", choices=("bf16", "mxfp4"), help="form of the routed experts (default: as they are)"
    )
    change.add_argument(
        "--shard-size",
        type=_size,
        default=MAX_SHARD_BYTES,
        metavar="SIZE",
        help="largest file, such as 500MB or 5GB (default)",
    )
    change.add_argument(
        "--scale-bias",
        type=int,
        choices=(125, 127),
        default=127,
        help="exponent bias of the MXFP4 scales in SRC: 125 for an older exporter",
    )
    change.set_defaults(run=_convert)
    return parser


def _inspect(args: argparse.Namespace) -> None:
    from k3jax.weights.inspect import report

    print(report(args.path))


def _convert(args: argparse.Namespace) -> None:
    from k3jax.weights.convert import convert

    convert(args.source, args.target, args.to, max_shard_bytes=args.shard_size, scale_bias=args.scale_bias)


def _size(text: str) -> int:
    """5GB, 500MB, 2000000 -> bytes (powers of 1000)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", text)
    size = int(float(found[1]) * 1000 ** " kMGT".index(found[2] or " ")) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return size


if __name__ == "__main__":
    sys.exit(main())
