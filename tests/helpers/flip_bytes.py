"""Flip bytes of a GGUF header and load it; anything but success or ValueError is reported. Not a test.

python flip_bytes.py FILE HEADER_BYTES   prints: files opened, models loaded, refusals
"""

import random
import resource
import sys
import traceback
from pathlib import Path

from companion.model import load
from companion.model.files import GGUF

SPACE = 600 * 2**20  # what a tiny model may take beyond what torch has taken already


def main(path: Path, header: int) -> int:
    load(path)  # everything imported
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + SPACE, now + SPACE))
    whole, rng = path.read_bytes(), random.Random(0)
    opened = loaded = refused = 0
    for case in range(1600):
        content = bytearray(whole)
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            at = rng.randrange(4, header)
            content[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, content[at] ^ (1 << rng.randrange(8))])
        path.write_bytes(content)
        try:
            if case % 3:
                GGUF(path).close()
                opened += 1
            else:
                load(path)
                loaded += 1
        except ValueError:
            refused += 1
        except BaseException:
            changed = [(i, whole[i], content[i]) for i in range(header) if whole[i] != content[i]]
            print(f"case {case}, bytes {changed}")
            traceback.print_exc(file=sys.stdout, limit=-4)
            return 1
    print(opened, loaded, refused)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
