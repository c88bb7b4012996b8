"""Build the wheel and the sdist of the package, from what git tracks.

    python -m tools.dist [FOLDER]      into FOLDER, dist/ without one

In a copy, so that nothing that lies about gets in, and by setuptools alone, as pip would call it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import address

BUILD = """import sys, setuptools.build_meta as b
folder = sys.argv[1]  # setuptools writes its own arguments over these
print(b.build_sdist(folder), b.build_wheel(folder))"""
NOT_SHIPPED = {"notebooks", "book", "_static", "tests", "benchmarks", "tools", ".github", ".ci"}


def build(folder: Path, root: Path = address.ROOT) -> list[Path]:
    """The two files, made in folder. Raises CalledProcessError with what setuptools said."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as copied:
        for path in address.paths(root):
            name = path.relative_to(root)
            if name.parts[0] not in NOT_SHIPPED:
                (Path(copied) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, Path(copied) / name)
        command = [sys.executable, "-c", BUILD, str(folder.resolve())]
        done = subprocess.run(command, cwd=copied, check=True, capture_output=True, text=True)
    return [folder / name for name in done.stdout.splitlines()[-1].split()]


def main(argv: list[str] | None = None) -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools.dist", description=__doc__, formatter_class=as_written)
    parser.add_argument("folder", nargs="?", type=Path, default=address.ROOT / "dist")
    try:
        print(*build(parser.parse_args(argv).folder), sep="\n")
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
