"""The command `kvq prefix`: what a prefix store's folder holds, whether it is whole, and less of it."""

import time
from argparse import Namespace
from pathlib import Path

from kvq_runtime.cli.table import print_record, print_table
from kvq_runtime.prefix import block_folder, maintenance
from kvq_runtime.prefix.block_folder import parse_bytes


def prefix(args: Namespace) -> int:
    """List, verify or clean; `verify` returns 1 if a block is damaged."""
    root = maintenance.existing(Path(args.folder).expanduser())
    return {"list": _list, "verify": _verify, "gc": _collect}[args.action](root, args)


def _list(root: Path, args: Namespace) -> int:
    rows = maintenance.listed(root)
    if rows or args.json:
        print_table(rows, args.json)
    else:
        print(f"{root} holds no prefixes")
    return 0


def _verify(root: Path, args: Namespace) -> int:
    begun, kept = time.perf_counter(), block_folder.all_blocks(root)
    faults = [{"path": str(one.path), "fault": one.fault} for one in maintenance.damaged(root)]
    seconds, size = time.perf_counter() - begun, sum(one.size for one in kept)
    record = {"blocks": len(kept), "bytes": size, "seconds": round(seconds, 3), "damaged": len(faults)}
    if args.json:
        print_record(record | {"damaged": faults}, json=True)
    else:
        print_record(record, json=False)
        if faults:
            print()
            print_table(faults, json=False)
    return int(bool(faults))


def _collect(root: Path, args: Namespace) -> int:
    budget = None if args.budget is None else parse_bytes(args.budget, "--budget ")
    removed = maintenance.collect(root, budget, args.grace, args.damaged, args.dry_run)
    print_table([{"removed": not args.dry_run, "path": str(one.path), "bytes": one.size} for one in removed], args.json)
    return 0
