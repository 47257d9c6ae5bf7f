"""The command line: see the package."""

import argparse
import sys
import tempfile
from pathlib import Path

import environments
from environments.capture import CLUSTER_SCRIPT


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m environments", description=(environments.__doc__ or "").splitlines()[0]
    )
    known = [[], "slurm", *environments.BY_START]
    parser.add_argument("names", nargs="*", choices=known, metavar="NAME")
    chosen = parser.parse_args().names
    if "slurm" in chosen:
        programs = environments.BY_START.items()
        chosen = [name for name, (program, _) in programs if environments.of_slurm(program)]
    if not chosen:
        for name, (program, _) in environments.BY_START.items():
            print(f"{name:32} {' '.join(program.needs)}")
        return 0
    sys.path.insert(0, str(CLUSTER_SCRIPT.parent))
    import cluster as slurm

    code = 0
    with tempfile.TemporaryDirectory(prefix="environments-") as folder:
        cluster = slurm.Cluster()
        cluster.start()
        try:
            for name in chosen:
                part, why = environments.lacks(environments.BY_START[name][0], cluster)
                if part:
                    print(f"{name}: no {part}: {why}", file=sys.stderr)
                    return 1
            for name, document in environments.capture(chosen, cluster, Path(folder)).items():
                if isinstance(document, environments.CaptureError):
                    print(document, file=sys.stderr)
                    code = 1
                else:
                    environments.write(environments.of_version(name, cluster.version), document)
        finally:
            cluster.stop()
    return code


if __name__ == "__main__":
    sys.exit(main())
